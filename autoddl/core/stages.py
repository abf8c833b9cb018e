"""Cuts a captured graph into the stages of a pipeline: every stage is a graph of its own, planned like any other.

    cuts [c_1, c_2, ...]     stage 0 has the ops before c_1, stage 1 those from c_1 to before c_2, and so on

Positions count the ops that the loss or a buffer needs, in order. The cone depends on no parameter, so a stage computes
again what it reads of it, and nothing is sent. Every other tensor that a later stage reads is a *transfer*, sent
straight to each stage that reads it:

    autoddl.send        at the end of the stage that makes the tensor: reads it, and writes a token
    autoddl.receive     at the start of the stage that reads it: reads nothing, and writes it

A gradient goes the other way: `receive` hands it on to the stage before, and `send` yields what comes from there. All
tokens of a stage are one chain, whose last stands in for the loss. A parameter that several stages read is a parameter
of each of them: their gradients are added up once a step (`shared`). One to which no gradient flows is not trained in
any stage: there is nothing to add up, and optimizers leave it alone.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.core.errors import InputError
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import needed_ops

__all__ = ["RECEIVE", "SEND", "StageGraph", "Transfer", "check_parameters", "check_updates", "crossing", "cut_graph",
           "may_be_partial", "readers_of", "shared_here", "shared_parameters", "transfers_of", "with_partial_ends"]

SEND = "autoddl.send"
"""Hands a tensor on to another stage of a pipeline."""

PARTIAL = "partial"
"""Says of an op that sends or receives that it may do so with partial sums."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that stage `source` sends to stage `target` for every microbatch, by its name in the graph.

    `gradient` says whether a gradient comes back.
    """

    tensor: str
    source: int
    target: int
    gradient: bool

    @property
    def sender(self) -> str:
        """The name of the op that sends."""
        return f"send.{self.tensor}.{self.target}"

    @property
    def lanes(self) -> tuple[str, str]:
        """The texts of the lanes of the tensor and of its gradient (`schedule.stage_lanes.Lane`)."""
        return (f"forward {self.tensor} {self.source} -> {self.target}",
                f"backward {self.tensor} {self.target} -> {self.source}")

    @property
    def receiver(self) -> str:
        """The name of the op that receives."""
        return f"receive.{self.tensor}"


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The graph of one stage. `origin` has, by tensor, its number in the whole graph; -1 for tokens."""

    graph: Graph
    origin: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Whole:
    """The graph that is cut: its needed ops with their stages, and what follows from them."""

    graph: Graph
    """The graph with its needed ops alone."""
    stage: tuple[int, ...]
    """By op, its stage."""
    dependent: frozenset[int]
    """The tensors that depend on a parameter."""
    producers: Mapping[int, int]
    """Tensor -> the op that writes it."""
    flows: frozenset[int]
    """The tensors with a gradient."""


def _whole(graph: Graph, cuts: Sequence[int]) -> _Whole:
    """The graph with its stages. Raises InputError where the cuts leave a stage without ops."""
    alive = replace(graph, ops=needed_ops(graph), outputs=graph.outputs[:1])
    ends = [*cuts, len(alive.ops)]
    if any(a >= b for a, b in zip([0, *cuts], ends, strict=True)):
        raise InputError(f"cuts at {list(cuts)} leave a stage without ops: they rise, from 1 to {len(alive.ops) - 1}")
    stage = tuple(bisect_right(cuts, i) for i in range(len(alive.ops)))
    return _Whole(alive, stage, alive.dependent(), alive.producers(), alive.differentiable())


def transfers_of(graph: Graph, cuts: Sequence[int]) -> tuple[Transfer, ...]:
    """The tensors that stages send each other, in the order in which they are made, then of their readers."""
    return tuple(_transfers(_whole(graph, cuts)))


def _transfers(whole: _Whole) -> list[Transfer]:
    reads = {(t, whole.stage[i]) for i, op in enumerate(whole.graph.ops) for t in op.inputs
             if t in whole.dependent and t in whole.producers and whole.stage[whole.producers[t]] != whole.stage[i]}
    order = sorted(reads, key=lambda read: (whole.producers[read[0]], read))
    return [Transfer(whole.graph.tensors[t].name, whole.stage[whole.producers[t]], target, t in whole.flows)
            for t, target in order]


def crossing(graph: Graph) -> tuple[frozenset[int], ...]:
    """For every position of a cut, from 1 on, the tensors that would be sent over it."""
    ops = needed_ops(graph)
    alive = replace(graph, ops=ops, outputs=graph.outputs[:1])
    dependent, producers = alive.dependent(), alive.producers()
    last = {t: i for i, op in enumerate(ops) for t in op.inputs if t in dependent and t in producers}
    found, live = [], set[int]()
    for i, op in enumerate(ops[:-1]):
        live = {t for t in (*live, *op.outputs) if last.get(t, -1) > i}
        found.append(frozenset(live))
    return tuple(found)


def shared_parameters(stages: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages read, with these stages; the first owns it."""
    return {fqn: where for fqn, where in readers_of(stages).items() if len(where) > 1}


def readers_of(stages: Sequence[StageGraph]) -> dict[str, tuple[int, ...]]:
    """Every parameter, with the stages that read it."""
    found: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for tensor in stage.graph.tensors:
            if tensor.kind is Kind.PARAMETER:
                found.setdefault(tensor.fqn, []).append(s)
    return {fqn: tuple(where) for fqn, where in found.items()}


def shared_here(stages: Sequence[StageGraph], placement: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The parameters that several stages of one part of the cluster read, with the stages of each such part.

    `placement` has the part of every stage.
    """
    found = {}
    for fqn, where in shared_parameters(stages).items():
        parts = [tuple(s for s in where if placement[s] == at) for at in dict.fromkeys(placement[s] for s in where)]
        if any(len(part) > 1 for part in parts):
            found[fqn] = tuple(part for part in parts if len(part) > 1)
    return found


def check_parameters(stages: Sequence[StageGraph], placement: Sequence[int]) -> None:
    """Raises InputError where a part of the cluster has no parameter: torch makes no optimizer of none.

    `placement` has the part of every stage.
    """
    owners = {placement[s] for where in readers_of(stages).values() for s in where}
    if idle := sorted(set(placement) - owners):
        which = [s for s, at in enumerate(placement) if at == idle[0]]
        raise InputError(f"stage{'s' * (len(which) > 1)} {', '.join(map(str, which))} of {len(stages)} would have no "
                         "parameter, and an optimizer needs some on every rank: cut elsewhere")


def check_updates(graph: Graph, pipes: int) -> None:
    """Raises InputError where steps update a buffer and several pipes would update a copy of it each."""
    if pipes > 1 and graph.updates:
        raise InputError(f"buffer {graph.tensors[graph.updates[0][0]].fqn} is updated by every microbatch, and "
                         f"{pipes} pipes would update a copy each: take 1f1b")


def cut_graph(graph: Graph, cuts: Sequence[int]) -> tuple[StageGraph, ...]:
    """The graphs of the stages; `graph` is the captured one, without hubs, of one microbatch.

    Parameters that no op reads belong to the last stage. Raises InputError for cuts that leave a stage without ops
    or one that no later stage reads from. So it does for cuts behind the loss, and between readers of a new buffer.
    """
    whole = _whole(graph, cuts)
    loss = whole.producers.get(graph.outputs[0], -1)
    if cuts and loss < cuts[-1]:
        raise InputError(f"the loss is made by op {loss}, before the last cut at {cuts[-1]}: cut before the loss")
    transfers = _transfers(whole)
    owners = _updates(whole)
    return tuple(_stage(whole, s, transfers, owners) for s in range(len(cuts) + 1))


def _updates(whole: _Whole) -> dict[tuple[int, int], int]:
    """The stage of every update of a buffer: that of its readers."""
    readers: dict[int, set[int]] = {}
    for i, op in enumerate(whole.graph.ops):
        for t in op.inputs:
            readers.setdefault(t, set()).add(whole.stage[i])
    found = {}
    for old, new in whole.graph.updates:
        stages = {whole.stage[whole.producers[new]]} if new in whole.producers else readers.get(new, set())
        if new in whole.dependent:
            stages |= readers.get(old, set())
        if len(stages) != 1:
            raise InputError(f"buffer {whole.graph.tensors[old].fqn} is updated in one stage and read in another "
                             f"({sorted(stages)}): cut elsewhere")
        found[old, new] = min(stages)
    return found


def _stage(whole: _Whole, s: int, transfers: Sequence[Transfer], owners: Mapping[tuple[int, int], int]) -> StageGraph:
    """The graph of stage s."""
    graph = whole.graph
    updates = [pair for pair, stage in owners.items() if stage == s]
    wanted = {graph.outputs[0]} if s == whole.stage[-1] or not transfers else set()
    own = [i for i, op in enumerate(graph.ops) if whole.stage[i] == s
           and not whole.dependent.isdisjoint(op.outputs)]
    kept = set(own) | _cone(whole, own, {new for _, new in updates})
    numbers = {tensor.name: t for t, tensor in enumerate(graph.tensors)}
    received = [one for one in transfers if one.target == s]
    sent = [one for one in transfers if one.source == s]
    if not sent and graph.outputs[0] not in wanted:
        raise InputError(f"stage {s} makes nothing that a later stage reads: cut elsewhere")
    used = {t for i in kept for t in (*graph.ops[i].inputs, *graph.ops[i].outputs)} | {t for u in updates for t in u}
    if wanted:
        read = {t for op in graph.ops for t in op.inputs}
        used |= {t for t, one in enumerate(graph.tensors) if one.kind is Kind.PARAMETER and t not in read}
    origin = sorted(used)
    place = {t: k for k, t in enumerate(origin)}
    ops = [_receive(one, place[numbers[one.tensor]]) for one in received]
    ops += [replace(graph.ops[i], inputs=tuple(place[t] for t in graph.ops[i].inputs),
                    outputs=tuple(place[t] for t in graph.ops[i].outputs)) for i in sorted(kept)]
    names = {one.tensor for one in received}
    tensors = [_received(graph.tensors[t]) if graph.tensors[t].name in names else
               replace(graph.tensors[t], trained=graph.tensors[t].trained and t in whole.flows) for t in origin]
    for one in sent:
        ops.append(_send(one, place[numbers[one.tensor]], len(tensors), ops[-1] if ops[-1].target == SEND else None))
        tensors.append(_token(tensors[place[numbers[one.tensor]]], one))
    last = place[graph.outputs[0]] if wanted else len(tensors) - 1
    made = Graph(tuple(tensors), tuple(ops), (last,), tuple((place[old], place[new]) for old, new in updates))
    return StageGraph(made, (*origin, *[-1] * len(sent)))


def _cone(whole: _Whole, own: Iterable[int], more: Iterable[int]) -> set[int]:
    """The ops of the cone that a stage computes for its own ops, or for new values of buffers."""
    left = [t for i in own for t in whole.graph.ops[i].inputs] + list(more)
    found = set[int]()
    while left:
        t = left.pop()
        if t in whole.producers and t not in whole.dependent and whole.producers[t] not in found:
            found.add(whole.producers[t])
            left += whole.graph.ops[whole.producers[t]].inputs
    return found


def with_partial_ends(stage: Graph, names: Collection[str]) -> Graph:
    """The graph of a stage that may send and receive these tensors, and their gradients, as partial sums."""
    return replace(stage, ops=tuple(
        replace(op, args=(*op.args, (PARTIAL, True)))
        if op.target in (SEND, RECEIVE) and (one := _sent(op, stage)).is_floating and one.name in names else op
        for op in stage.ops))


def may_be_partial(op: Op) -> bool:
    """Whether an op that sends or receives may do so with partial sums."""
    return any(name == PARTIAL for name, _ in op.args)


def _sent(op: Op, stage: Graph) -> Tensor:
    """The tensor that an op sends or receives."""
    return stage.tensors[(op.outputs if op.target == RECEIVE else op.inputs)[0]]


def _received(tensor: Tensor) -> Tensor:
    return replace(tensor, kind=Kind.RESULT)


def _receive(one: Transfer, at: int) -> Op:
    """The op that brings a tensor."""
    return Op(one.receiver, RECEIVE, (), (), (at,), (("gradient", one.gradient), ("stage", one.source)))


def _send(one: Transfer, at: int, token: int, before: Op | None) -> Op:
    """The op that hands a tensor on; it reads the token of the one before, so that all tokens are one chain."""
    inputs, slots = ((at,), ("self",)) if before is None else ((at, *before.outputs), ("self", "after"))
    return Op(one.sender, SEND, inputs, slots, (token,), (("stage", one.target),))


def _token(tensor: Tensor, one: Transfer) -> Tensor:
    dtype = tensor.dtype if tensor.is_floating else "float32"
    return Tensor(f"token.{one.tensor}.{one.target}", (), dtype, Kind.RESULT)
