"""Describes an op on one rank's shards (`LocalOp`) and the memory it holds (`Footprint`)."""

from dataclasses import dataclass
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.families import family_of
from autoddl.operators.footprints.storages import Shape, Value
from autoddl.operators.windows import Window, windows_of
from autoddl.operators.work import base

__all__ = ["Footprint", "LocalOp", "Shapes", "has_local_kernel"]

Shapes = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One operator as one rank runs it, on that rank's shards."""

    op: Op
    """The op as captured."""
    inputs: tuple[Value, ...]
    """The shards of the inputs."""
    outputs: Shapes
    """Shapes of the shards of the outputs."""
    itemsizes: tuple[int, ...]
    """Bytes of an element of every output."""
    needs: tuple[int, ...]
    """Positions of the inputs that receive a gradient."""
    inner: bool = False
    """Whether the kernel is written for shards (`has_local_kernel`)."""
    on_cpu: bool = False
    """Whether the op runs on a CPU, where torch takes other paths for some ops."""
    sends: bool = False
    """Whether the kernel communicates by itself."""
    whole: Shape = ()
    """The whole shape of the first input, () where its shard is all of it."""
    by_hand: bool = False
    """Whether kernels are written by hand, which know what a shard of queries sees and take no mask for it."""

    @property
    def nbytes(self) -> float:
        """Bytes of the first output."""
        return prod(self.outputs[0]) * self.itemsizes[0]

    @property
    def windows(self) -> dict[int, Window]:
        """Where the op looks, by dim of its first input (`windows_of`)."""
        first, *others = (one.shape for one in self.inputs)
        return windows_of(self.op, (self.whole or first, *others))

    def slot(self, name: str) -> Value | None:
        """The input in slot `name`, None if the call has none."""
        k = self.op.slot(name)
        return None if k is None else self.inputs[k]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that one op needs for a moment and keeps for its backward; all sizes in bytes."""

    saves: tuple[int, ...] = ()
    """Positions of the inputs that are kept for backward."""
    keeps: tuple[int, ...] = ()
    """Positions of the outputs that are kept for backward."""
    extra: float = 0.0
    """Bytes kept that are neither an input, an output nor a copy of an input: masks, statistics."""
    copies: tuple[tuple[int, float], ...] = ()
    """(position, bytes) of every input of which a copy is kept instead of the input itself."""
    before: float = 0.0
    """Bytes of temporaries while the outputs do not exist yet."""
    during: float = 0.0
    """Bytes of temporaries while the outputs exist."""
    back: float = 0.0
    """Bytes of temporaries in backward, while all gradients exist."""
    late: float = 0.0
    """Bytes of temporaries in backward, after the output's gradient and `extra` have been freed."""
    slack: float = 0.0
    """Bytes that the first output's storage has beyond the output."""
    passes: tuple[int, ...] = ()
    """Positions of the inputs whose gradient is the output's gradient itself."""
    output_shaped: bool = False
    """Whether the gradients of the other inputs have the output's shape before they are summed to the input's."""

    @property
    def beside(self) -> float:
        """Bytes that are kept and are neither an input nor an output."""
        return self.extra + sum(size for _, size in self.copies)


def has_local_kernel(op: Op, graph: Graph, inputs: Shapes, inner: bool) -> bool:
    """Whether a kernel of ours, written for shards, replaces the op of torch.

        inner        the kernel reduces over mesh axes
        embedding    its table is split by rows
        attention    its causal mask starts at a later query
        mean losses  the shard has a share of the elements
    """
    name, shape = base(op), graph.tensors[op.inputs[0]].shape if op.inputs else ()
    if name in ("aten.embedding", "autoddl.embedding_bag"):
        return inputs[0][0] < shape[0]
    if "attention" in name:
        return bool(dict(op.args).get("is_causal")) and inputs[0][-2] < shape[-2]
    if "distance" in family_of(name).flags:
        return inputs[0] != shape
    return inner
