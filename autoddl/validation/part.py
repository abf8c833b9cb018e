"""Values between a published run and its price: the question for one part, its cheapest layouts, its seconds.

    PartSpec -> PartChoice -> Part      `price_part`

A `Part` is a sum: every kernel, conversion and kept tensor is a `Part` with the fields that it adds to, all others 0.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import add, attrgetter

from autoddl.core.graph import Op, Tensor
from autoddl.operators.fusion import Chained
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Variable
from autoddl.validation.layers import Shape

__all__ = ["Part", "PartChoice", "PartSpec", "add_parts"]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of a model, and how a program computes it on a mesh."""

    name: str
    """`layer`, `embedding` or `head`."""
    shape: Shape
    """Sizes of one microbatch."""
    mesh: str
    """Axes that cut the part, as text like `ep=8,cp=2,tp=4`."""
    sequence_parallel: bool
    """Whether the stream between layers is split along the sequence over tp."""
    precision: str
    """Dtype of linear layers where it is narrower than that of activations; else empty."""
    fuses: bool
    """Whether chains of elementwise operators are one kernel."""
    attention_slowdown: float = 1.0
    """How many times longer fused attention takes than by the best kernels of the device."""
    expert_axes: str = ""
    """Axes, of cp and tp, that cut experts besides ep, with a space between them."""
    unpads: bool = False
    """Whether padding is taken out around fused attention (`Software.unpads`)."""
    expert_biases: bool = False
    """Whether biases of experts and clamps of their gates are kernels of their own."""


@dataclass(frozen=True, slots=True)
class PartChoice:
    """A part on a mesh, with the cheapest choice for every variable of its region."""

    pricing: Pricing
    space: tuple[Variable, ...]
    chosen: tuple[Choice, ...]
    differentiable: frozenset[int]
    """Tensors through which a gradient flows."""
    fused: Mapping[str, Chained]
    """By name, what an operator saves in a compiled program."""

    def items(self) -> Iterator[tuple[Op | Tensor, Choice]]:
        """Yields operators and parameters with their choices, in the order of the space."""
        for variable, choice in zip(self.space, self.chosen, strict=True):
            yield variable.item, choice

    def operators(self) -> Iterator[tuple[Op, Choice]]:
        """Yields operators alone, with their choices."""
        for item, choice in self.items():
            if isinstance(item, Op):
                yield item, choice


@dataclass(frozen=True, slots=True)
class Part:
    """The seconds, bytes and values of one part of a model on one rank, for one microbatch."""

    forward: float = 0.0
    """Seconds of the kernels of forward."""
    backward: float = 0.0
    """Seconds of the kernels that make gradients of inputs."""
    weight: float = 0.0
    """Seconds of the kernels that make gradients of weights."""
    core: float = 0.0
    """Seconds of `forward` in the core of attention, which selective recomputation repeats."""
    repeated: float = 0.0
    """Seconds of `forward` that recomputation by operators repeats: every other product and all that is bound by
    memory, but no fused attention."""
    sent_forward: float = 0.0
    """Seconds of conversions in forward, without those around attention and experts."""
    sent_backward: float = 0.0
    """Seconds of the same conversions' gradients in backward."""
    dispatch_forward: float = 0.0
    """Seconds in forward that bring tokens to their experts and back."""
    dispatch_backward: float = 0.0
    """Seconds in backward that bring gradients of tokens to their experts and back."""
    context: float = 0.0
    """Seconds of conversions around attention's core, of keys and values and of their gradients."""
    saved: float = 0.0
    """Bytes kept for backward."""
    core_saved: float = 0.0
    """Bytes of `saved` in the core of attention."""
    values: float = 0.0
    """Parameters that a rank has."""
    expert_values: float = 0.0
    """Parameters of `values` that are cut among the experts' ranks."""
    operators: float = 0.0
    """Operators of forward that the host starts."""
    backward_operators: float = 0.0
    """Operators of backward that the host starts."""
    host_forward: float = 0.0
    """Seconds of the host in forward for kernels besides the operators."""
    host_backward: float = 0.0
    """Seconds of the host in backward for kernels besides the operators."""
    awaited: float = 0.0
    """Seconds of the device before the host waits for it, beyond the host's own for the kernels besides."""
    awaited_operators: float = 0.0
    """Operators that the host starts in those seconds."""
    modules: float = 0.0
    """Seconds that recomputation of the second norm and of the experts' activation takes."""
    modules_saved: float = 0.0
    """Bytes that this recomputation saves."""


_NAMES = tuple(field.name for field in fields(Part))


def add_parts(parts: Iterable[Part]) -> Part:
    """Adds parts field by field, in their order."""
    return Part(*(reduce(add, column, 0.0) for column in zip(*map(attrgetter(*_NAMES), parts), strict=True)))
