"""An op on a rank's pieces, and the words for what it holds: see `footprints`."""

from dataclasses import dataclass
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.families import family_of
from autoddl.operators.footprints.storages import Shape, Value
from autoddl.operators.work import base

__all__ = ["Call", "Footprint", "Shapes", "by_itself"]

Shapes = tuple[Shape, ...]
@dataclass(frozen=True, slots=True)
class Call:
    """An op on local pieces: `outputs` are shapes, `wide` the itemsizes of the outputs, `needs` the inputs to which a
    gradient flows, `inner` whether the kernel reduces over mesh axes by itself, `processor` whether it runs on one."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: Shapes
    wide: tuple[int, ...]
    needs: tuple[int, ...]
    inner: bool = False
    processor: bool = False

    @property
    def nbytes(self) -> float:
        """Of the first output."""
        return prod(self.outputs[0]) * self.wide[0]

    def slot(self, name: str) -> Value | None:
        k = self.op.slot(name)
        return None if k is None else self.inputs[k]


@dataclass(frozen=True, slots=True)
class Footprint:
    """`saves` are inputs that are kept, `keeps` outputs, `extra` bytes kept beside, `copies` bytes of copies of inputs
    that are kept in their place. `before` and `during` are bytes of temporaries without and with the outputs, `back`
    those with all gradients, `late` those when neither the output's gradient nor what is kept beside is there any more.
    `slack` is memory that the first output has beyond itself; `passes` are inputs whose gradient is the output's,
    `wide` says that the others' are of its shape first."""

    saves: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    extra: float = 0.0
    copies: tuple[tuple[int, float], ...] = ()
    before: float = 0.0
    during: float = 0.0
    back: float = 0.0
    late: float = 0.0
    slack: float = 0.0
    passes: tuple[int, ...] = ()
    wide: bool = False

    @property
    def beside(self) -> float:
        """Bytes that are kept and are neither an input nor an output."""
        return self.extra + sum(size for _, size in self.copies)


def by_itself(op: Op, graph: Graph, inputs: Shapes, inner: bool) -> bool:
    """Whether the kernel is written out for pieces: it reduces (`inner`), its table is split by rows, its causal mask
    begins at another query, or its mean is over a share of the elements."""
    name, shape = base(op), graph.tensors[op.inputs[0]].shape if op.inputs else ()
    if name == "aten.embedding":
        return inputs[0][0] < shape[0]
    if "attention" in name:
        return bool(dict(op.args).get("is_causal")) and inputs[0][-2] < shape[-2]
    if "distance" in family_of(name).flags:
        return inputs[0] != shape
    return inner
