"""Prices optimizers: the bytes of state that they keep of a parameter, and the seconds of an update.

    state bytes     states * bytes of an element of the master + nbytes                               per element
    moved bytes     bytes of an element * (3 + 2 states) + 2 nbytes                                   per element

An update reads the parameter, its gradient and its state, and writes the parameter and its state: AdamW in float32
moves 28 bytes an element. Seconds are those of a kernel that moves these bytes; its launches are not counted.
"""

from dataclasses import dataclass

from autoddl.core.errors import InputError
from autoddl.core.graph import Tensor
from autoddl.cost_models import Device, elementwise_seconds, parse_quantity

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_of"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer: `states` tensors like the parameter, and `nbytes` bytes of state an element besides."""

    states: int = 0
    nbytes: float = 0.0

    def copies(self, tensor: Tensor) -> float:
        """Bytes of state of a parameter, over the bytes of its master."""
        return self.states + self.nbytes / tensor.stored.itemsize

    @property
    def is_adam(self) -> bool:
        """Whether an update needs temporaries of the parameter's size, as Adam and its variants do."""
        return self.states == 2

    def seconds(self, device: Device, tensor: Tensor, elements: float) -> float:
        """Seconds of updating `elements` elements of a parameter: those of a kernel that moves their bytes."""
        moved = tensor.stored.itemsize * (3 + 2 * self.states) + 2 * self.nbytes
        return elementwise_seconds(device, elements * moved) - device.launch


OPTIMIZERS = {"sgd": Optimizer(0), "sgd-momentum": Optimizer(1), "momentum": Optimizer(1), "adam": Optimizer(2),
              "adamw": Optimizer(2), "adafactor": Optimizer(0)}
"""Optimizers by name. Adafactor's factored state is a row and a column of a matrix, which is not counted."""


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
        raise InputError(f"optimizer {text!r} is not known; known are {', '.join(OPTIMIZERS)}, and bytes of state a "
                         "parameter, like '12 B'")
    return Optimizer(0, nbytes)
