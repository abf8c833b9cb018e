"""One repeated part of a published run, priced as the planner prices it: graph, region, exact choice, kernels.

    mesh      replicas' experts (ep), context (cp), tensor (tp), the last innermost
    region    weights as Megatron cuts them (Shoeybi et al. 2019; Korthikanti et al. 2022), and the layout of the stream
              x between the blocks; the rest of the layouts is what the exact solver finds cheapest
    F, B, W   kernels forward, backward to the inputs, backward to the weights; what conversions take besides

Gradients that meet at a tensor with several readers are added up. A chain of elementwise ops that a compiler or a
hand-written kernel fuses moves its first inputs and last output alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from autoddl.cost_models import Cluster, kernel_seconds
from autoddl.graph import Graph, Kind, Op, Tensor
from autoddl.hubs import HUB
from autoddl.layout import B, Layout, Mesh, Split, State, local_shape
from autoddl.price import Pricing, inner_seconds, kernel_of, routes_of
from autoddl.search import solve
from autoddl.space import Choice, Region, Variable, variables
from autoddl.tables import edges_of, problem_of, saved_tensors
from autoddl.validate_graph import graph_of
from autoddl.validate_model import Shape
from autoddl.work import VIEWS, Work, base, keeps_output, kept_beside, work

__all__ = ["Asked", "Part", "part"]

CUTS: Mapping[str, State] = {
    "attention.qkv.weight": Split(0), "attention.qkv.bias": Split(0), "attention.o.weight": Split(1),
    "mlp.up.weight": Split(0), "mlp.up.bias": Split(0), "mlp.down.weight": Split(1), "mlp.up": Split(2),
    "mlp.down": Split(1), "tokens.weight": Split(0), "head.weight": Split(0)}
"""Parameter -> how tensor parallelism cuts it; all others are whole."""
_FUSED = frozenset(f"aten.{name}" for name in ("add", "mul", "gelu", "silu", "relu", "softmax", "_to_copy", "div")
                   ) | {"autoddl.dropout"}
_AGAIN = frozenset(f"aten.{name}" for name in ("gelu", "silu", "relu", "mul"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A part of a model on a mesh, as text like `ep=8,cp=2,tp=4`; `precision` is the dtype of linear layers;
    `slower` is how many times longer fused attention takes than with the best kernels of the device;
    `experts` says `tp` where that axis cuts experts apart instead of each."""

    what: str
    shape: Shape
    mesh: str
    sequence: bool
    precision: str
    fuses: bool
    slower: float = 1.0
    experts: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one microbatch on one rank. `core` is the share of forward that selective recomputation repeats;
    `saved` are bytes kept for backward, `core_saved` those of the core; `values` are parameters held by a rank, of
    which `expert_values` are cut among experts' ranks; `calls` are operators that the host starts."""

    forward: float
    backward: float
    weight: float
    core: float
    sent_forward: float
    sent_backward: float
    context: float
    saved: float
    core_saved: float
    values: float
    expert_values: float
    calls: float
    backward_calls: float


def _stream(mesh: Mesh, sequence: bool) -> Layout:
    """x between blocks: batch over ep, length over cp, and over tp with sequence parallelism."""
    states = {"ep": Split(0), "cp": Split(1), "tp": Split(1) if sequence else B}
    return Layout(tuple(states[name] if size > 1 else B for name, size in zip(mesh.names, mesh.sizes, strict=True)))


def _stored(name: str, mesh: Mesh, experts: str) -> Layout:
    expert = name in ("mlp.up", "mlp.down")
    def state(axis: str) -> State:
        if expert and axis in ("ep", experts):
            return Split(0)
        return CUTS.get(name, B) if axis == "tp" else B

    return Layout(tuple(state(axis) if size > 1 else B for axis, size in zip(mesh.names, mesh.sizes, strict=True)))


def megatron(mesh: Mesh, sequence: bool, experts: str) -> Region:
    """The region of the module docstring."""
    stream = _stream(mesh, sequence)

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        if isinstance(item, Tensor):
            return choice.outputs[0] == _stored(item.fqn, mesh, experts) and not choice.regather
        tensor = graph.tensors[item.outputs[0]]
        between = item.module in ("", "first", "second", "norm") and base(item) not in VIEWS
        if item.target == HUB and graph.tensors[item.inputs[0]].kind is Kind.PARAMETER:
            return True
        return not between or len(tensor.shape) != 3 or choice.outputs[0] == stream

    return allowed


@lru_cache(maxsize=2_000)
def _chosen(what: str, shape: Shape, mesh: Mesh, sequence: bool, experts: str, cluster: Cluster
            ) -> tuple[Pricing, tuple[Variable, ...], tuple[Choice, ...]]:
    pricing = Pricing(graph_of(what, shape), mesh, cluster)
    space = variables(pricing.graph, mesh, megatron(mesh, sequence, experts))
    solution = solve(problem_of(pricing, space, None))
    return pricing, space, tuple(v.choices[k] for v, k in zip(space, solution.choice, strict=True))


def _idle(graph: Graph, op: Op) -> bool:
    """Ops that only bring x in and the loss out."""
    return any(graph.tensors[t].fqn == "inlet" for t in op.inputs) or not graph.tensors[op.outputs[0]].shape


@lru_cache(maxsize=5_000)
def part(asked: Asked, cluster: Cluster) -> Part:
    """Price one part."""
    mesh = Mesh.parse(asked.mesh)
    pricing, space, chosen = _chosen(asked.what, asked.shape, mesh, asked.sequence, asked.experts, cluster)
    graph, differentiable = pricing.graph, pricing.graph.differentiable()
    total = dict.fromkeys(Part.__slots__, 0.0)
    for variable, choice in zip(space, chosen, strict=True):
        item = variable.item
        if isinstance(item, Tensor):
            local = float(_numel(item, choice.outputs[0], mesh))
            total["values"] += local
            total["expert_values"] += local if item.fqn in ("mlp.up", "mlp.down") else 0.0
        elif not _idle(graph, item):
            _add_op(total, asked, pricing, item, choice, differentiable)
    _add_edges(total, pricing, space, chosen, differentiable)
    _add_saved(total, asked.fuses, pricing, space, chosen, differentiable)
    return Part(**total)


def _add_saved(total: dict[str, float], fuses: bool, pricing: Pricing, space: tuple[Variable, ...],
               chosen: tuple[Choice, ...], differentiable: frozenset[int]) -> None:
    """What backward reads, each storage once, as its writer laid it out; masks besides. Nothing inside a fused chain
    is kept: its backward computes it again."""
    graph, mesh = pricing.graph, pricing.mesh
    makers, users = graph.producers(), graph.consumers()
    layouts = {t: c for v, choice in zip(space, chosen, strict=True) if isinstance(v.item, Op)
               for t, c in zip(v.item.outputs, choice.outputs, strict=True)}
    wanted = saved_tensors(graph, differentiable) | {t for op in graph.ops if keeps_output(op, differentiable)
                                                     for t in op.outputs}
    found = set()
    for t in wanted:
        while t in makers and (base(graph.ops[makers[t]]) in VIEWS) and graph.ops[makers[t]].inputs[0] in layouts:
            t = graph.ops[makers[t]].inputs[0]
        inside = t in makers and base(graph.ops[makers[t]]) in _AGAIN and len(users[t]) == 1
        if not (fuses and inside and base(graph.ops[users[t][0][0]]) in _AGAIN):
            found.add(t)
    for t in found & layouts.keys():
        nbytes = _numel(graph.tensors[t], layouts[t], mesh) * graph.tensors[t].itemsize
        total["saved"] += nbytes
        total["core_saved"] += nbytes * (_core(graph.ops[makers[t]]) and graph.tensors[t].numel > 0
                                         and base(graph.ops[makers[t]]) in ("aten.softmax", "autoddl.dropout"))
    for v, choice in zip(space, chosen, strict=True):
        if isinstance(v.item, Op):
            local = tuple(local_shape(graph.tensors[t].shape, c, mesh)
                          for t, c in zip(v.item.outputs, choice.outputs, strict=True))
            mask = kept_beside(v.item, local, differentiable)
            total["saved"] += mask
            total["core_saved"] += mask * _core(v.item)


def _numel(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    count = 1
    for size in local_shape(tensor.shape, layout, mesh):
        count *= size
    return count


def _add_op(total: dict[str, float], asked: Asked, pricing: Pricing, op: Op, choice: Choice,
            differentiable: frozenset[int]) -> None:
    """Kernels of one op, and the bytes of its outputs that stay."""
    graph, mesh = pricing.graph, pricing.mesh
    inputs, outputs = (tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(ts, cs, strict=True))
                       for ts, cs in ((op.inputs, choice.inputs), (op.outputs, choice.outputs)))
    forward, backward = work(op, graph, inputs, outputs, differentiable)
    if op.target == HUB and graph.tensors[op.inputs[0]].kind is not Kind.PARAMETER:
        adds = len(graph.consumers()[op.outputs[0]]) - 1
        backward = (Work(0.0, 3.0 * adds * _numel(graph.tensors[op.inputs[0]], choice.outputs[0], mesh)
                         * graph.tensors[op.inputs[0]].itemsize),)
    saved = _joined(graph, op) if asked.fuses else 0.0
    low = asked.precision if base(op) in ("aten.linear", "aten.matmul") and _of_weight(graph, op) else ""
    core = _core(op)
    for kernel in forward:
        seconds = _seconds(pricing, asked, op, kernel, low, saved)
        total["forward"] += seconds
        total["core"] += seconds * core
    for kernel in backward:
        total["weight" if kernel.weight else "backward"] += _seconds(pricing, asked, op, kernel, low, saved)
    total["calls"] += 1
    total["backward_calls"] += len(backward) or 1
    reduced = sum(inner_seconds(pricing, op, choice).values()) if choice.inner else 0.0
    total["sent_forward"] += reduced


def _core(op: Op) -> bool:
    """The attention core: both products and what is between."""
    return op.module == "attention" and base(op) not in VIEWS


def _of_weight(graph: Graph, op: Op) -> bool:
    return any(graph.tensors[t].kind is Kind.PARAMETER for t in op.inputs) and op.module != "head"


def _joined(graph: Graph, op: Op) -> float:
    """The share of an elementwise op's bytes that a fused chain does not move: input and output that stay inside."""
    if base(op) not in _FUSED:
        return 0.0
    makers, users = graph.producers(), graph.consumers()
    moved = sum(graph.tensors[t].nbytes for t in (*op.inputs, *op.outputs))
    inside = sum(graph.tensors[t].nbytes for t in op.inputs if t in makers and base(graph.ops[makers[t]]) in _FUSED
                 and len(users[t]) == 1)
    inside += sum(graph.tensors[t].nbytes for t in op.outputs
                  if len(users[t]) == 1 and base(graph.ops[users[t][0][0]]) in _FUSED)
    return inside / moved if moved else 0.0


def _seconds(pricing: Pricing, asked: Asked, op: Op, kernel: Work, low: str, joined: float) -> float:
    """Seconds of one kernel, in a narrower dtype with the cast of what it reads."""
    device, dtype = pricing.cluster.device, pricing.graph.tensors[op.outputs[0]].dtype
    if kernel.kind.startswith("attention"):
        return kernel_seconds(device, kernel_of(kernel, dtype)) * asked.slower
    if low and kernel.kind == "matmul":
        batch, m, _, k = kernel.shape
        cast = kernel_of(Work(0.0, 3.0 * batch * m * k), dtype)
        return kernel_seconds(device, kernel_of(kernel, low)) + kernel_seconds(device, cast)
    if joined and kernel.kind == "memory":
        kernel = replace(kernel, nbytes=kernel.nbytes * (1 - joined))
    return kernel_seconds(device, kernel_of(kernel, dtype))


def _add_edges(total: dict[str, float], pricing: Pricing, space: tuple[Variable, ...], chosen: tuple[Choice, ...],
               differentiable: frozenset[int]) -> None:
    """Conversions of activations there and of their gradients back."""
    graph = pricing.graph
    for edge in edges_of(graph, space):
        source, target = space[edge.source], space[edge.target]
        if isinstance(source.item, Tensor) or (isinstance(target.item, Op) and _idle(graph, target.item)):
            continue
        table = routes_of(pricing, graph.tensors[edge.tensor])
        out, into = chosen[edge.source], chosen[edge.target]
        steps = table.seconds[table.index[out.outputs[edge.port]], table.index[into.inputs[edge.slot]]]
        back = 0.0
        if edge.tensor in differentiable:
            back = table.seconds[table.index[into.gradients[edge.slot]], table.index[out.wanted[edge.port]]]
        core = isinstance(target.item, Op) and base(target.item) == "aten.scaled_dot_product_attention"
        total["context" if core else "sent_forward"] += float(steps + back * core)
        total["sent_backward"] += float(back) * (not core)
