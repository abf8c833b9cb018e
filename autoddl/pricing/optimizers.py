"""Prices optimizers: the bytes of state that they keep of a parameter, what an update moves and what it computes.

    state bytes     states * bytes of an element of the master + nbytes                               per element
    moved bytes     bytes of an element * (3 + 2 states) + 2 nbytes                                   per element
    Muon            5 (4 m^2 n + 2 m^3) flops for a matrix of m x n, m <= n                           per matrix

An update reads the parameter, its gradient and its state, and writes the parameter and its state: AdamW in float32
moves 28 bytes an element. Seconds are those of a kernel that moves these bytes; its launches are not counted.

Muon (Jordan et al. 2024) makes the momentum of a matrix orthogonal by five Newton-Schulz iterations in bfloat16. With X
the momentum, each computes A = X X^T, B = b A + c A A, X = a X + B X. It has one state of a matrix; what is no matrix
is updated by AdamW, with two. Adafactor (Shazeer and Stern 2018) keeps a row and a column of a matrix, and one state of
a vector.
"""

from dataclasses import dataclass

from autoddl.core.errors import InputError
from autoddl.core.graph import Tensor
from autoddl.core.names import near_names
from autoddl.cost_models import Device, elementwise_seconds, parse_quantity

__all__ = ["OPTIMIZERS", "OWN_MOMENTUM", "Optimizer", "optimizer_of"]

ITERATIONS = 5
"""Newton-Schulz iterations of an update of Muon."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer: `states` tensors like the parameter, and `nbytes` bytes of state an element besides.

    An `orthogonal` one is Muon; a `factored` one keeps sums of rows and columns.
    """

    states: int = 0
    nbytes: float = 0.0
    orthogonal: bool = False
    factored: bool = False

    def _states(self, tensor: Tensor) -> float:
        """Sizes of the parameter that its state has."""
        if self.factored:
            return sum(1 / size for size in tensor.shape[-2:]) if len(tensor.shape) > 1 else 1.0
        return 2.0 if self.orthogonal and len(tensor.shape) != 2 else self.states

    def copies(self, tensor: Tensor) -> float:
        """Bytes of state of a parameter, over the bytes of its master."""
        return self._states(tensor) + self.nbytes / tensor.stored.itemsize

    @property
    def is_adam(self) -> bool:
        """Whether an update needs two temporaries of the parameter's size, as Adam, its variants and Muon do."""
        return self.states == 2 or self.orthogonal

    def seconds(self, device: Device, tensor: Tensor, elements: float) -> float:
        """Seconds of updating `elements` elements of a parameter, without products: a kernel that moves their bytes."""
        moved = tensor.stored.itemsize * (3 + 2 * self._states(tensor)) + 2 * self.nbytes
        return elementwise_seconds(device, elements * moved) - device.launch

    def products(self, tensor: Tensor) -> tuple[tuple[float, int], ...]:
        """The products of an update: flops, and elements of the factor that a rank with a part of the other reads."""
        if not self.orthogonal or len(tensor.shape) != 2:
            return ()
        short, long = sorted(tensor.shape)
        own, square = (2.0 * short * short * long, short * long), (2.0 * short ** 3, short * short)
        return (own, square, own) * ITERATIONS


OPTIMIZERS = {"sgd": Optimizer(0), "sgd-momentum": Optimizer(1), "momentum": Optimizer(1), "adam": Optimizer(2),
              "adamw": Optimizer(2), "adafactor": Optimizer(factored=True), "muon": Optimizer(1, orthogonal=True)}
"""Optimizers by name."""

OWN_MOMENTUM = ("sgd-momentum", "momentum", "muon")
"""Those that sum velocities as sparse sums with momentum do, which then count twice."""


def optimizer_of(text: str) -> Optimizer:
    """The optimizer of a name, or one that keeps so many bytes of state per element, like `12 B`.

    Raises InputError for another text.
    """
    if text in OPTIMIZERS:
        return OPTIMIZERS[text]
    try:
        nbytes = float(parse_quantity(text, "bytes"))
    except InputError:
        nbytes = -1.0
    if nbytes < 0:
        rest = f"known are {', '.join(OPTIMIZERS)}, and bytes of state a parameter, like '12 B'"
        raise InputError(f"optimizer {text!r} is not known; {near_names(text, OPTIMIZERS, rest, most=1)}")
    return Optimizer(0, nbytes)
