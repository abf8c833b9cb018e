"""The region of the space in which a published run is priced: weights and stream as Megatron-LM cuts them.

    weights     by columns into a block and by rows out of it, vocabulary by rows (Shoeybi et al. 2019)
    stream x    between blocks: batch over ep, length over cp, and over tp with sequence parallelism (Korthikanti et al.
                2022), else whole
    attention   queries over cp, where keys and values are gathered: its ring is priced by `layer_seconds`
    experts     apart over ep, and over those of cp and tp that cut them too; over tp else each of them
    reading     an op reads a weight that is cut as it is stored: no gather of weights stands in for one of activations
"""

from collections.abc import Mapping

from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import B, Layout, Mesh, Split, State
from autoddl.operators.ring import ATTENTION
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.space import Choice, Region
from autoddl.validation.layers import EXPERT_WEIGHTS, STREAM_MODULES

__all__ = ["megatron_region"]

CUTS: Mapping[str, State] = {
    "attention.qkv.weight": Split(0), "attention.qkv.bias": Split(0), "attention.o.weight": Split(1),
    "mlp.up.weight": Split(0), "mlp.up.bias": Split(0), "mlp.down.weight": Split(1), "mlp.up": Split(2),
    "mlp.down": Split(1), "tokens.weight": Split(0), "head.weight": Split(0)}
"""Parameter -> how tensor parallelism cuts it; all others are whole."""


def _stream(mesh: Mesh, sequence_parallel: bool) -> Layout:
    """x between blocks: batch over ep, length over cp, and over tp with sequence parallelism."""
    states = {"ep": Split(0), "cp": Split(1), "tp": Split(1) if sequence_parallel else B}
    return Layout(tuple(states[name] if size > 1 else B for name, size in zip(mesh.names, mesh.sizes, strict=True)))


def _stored(name: str, mesh: Mesh, expert_axes: str) -> Layout:
    def state(axis: str) -> State:
        if name in EXPERT_WEIGHTS and axis in ("ep", *expert_axes.split()):
            return Split(0)
        return CUTS.get(name, B) if axis == "tp" else B

    return Layout(tuple(state(axis) if size > 1 else B for axis, size in zip(mesh.names, mesh.sizes, strict=True)))


def megatron_region(mesh: Mesh, sequence_parallel: bool, expert_axes: str) -> Region:
    """Returns the region of Megatron-LM's choices, as the module docstring has it.

    `expert_axes` names the axes, of cp and tp, that cut experts besides ep.
    """
    contexts = [a for a, axis in enumerate(mesh.axes) if axis.name == "cp" and axis.size > 1]
    stream, whole = _stream(mesh, sequence_parallel), Layout.broadcast(mesh)

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        if isinstance(item, Tensor):
            return choice.outputs[0] == _stored(item.fqn, mesh, expert_axes) and not choice.regather
        for t, layout in zip(item.inputs, choice.inputs, strict=True):
            if graph.tensors[t].kind is Kind.PARAMETER:
                stored = _stored(graph.tensors[t].fqn, mesh, expert_axes)
                if layout != stored != whole:
                    return False
        if item.target == ATTENTION and any(choice.inner or choice.inputs[0][a] != Split(2) for a in contexts):
            return False
        tensor = graph.tensors[item.outputs[0]]
        between = item.module in STREAM_MODULES and base(item) not in VIEWS
        if item.target == HUB and graph.tensors[item.inputs[0]].kind is Kind.PARAMETER:
            return True
        return not between or len(tensor.shape) != 3 or choice.outputs[0] == stream

    return allowed
