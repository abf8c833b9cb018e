"""Makes the graph that is planned: only the ops that are needed, and a hub behind every shared tensor.

Needed are the ops that the loss or a buffer update depends on. In a graph of evaluation, which trains no parameter,
other outputs need theirs too. A tensor that depends on a parameter and has several
consumers passes through one *hub*, an identity op. The tensor is converted once to the hub's layout, and each consumer
converts from there. The consumers' gradients add up at the hub and are converted back once.

So every cost of a plan belongs to an op or to one edge, and nothing is counted twice. The saving of a shared conversion
is part of the problem, and not of a later pass. On one mesh axis a hub is in one of these states:

    S(d)   reads S(d), gradients add up as S(d)          P    reads P, gradients add up as B
    B      reads B, gradients add up as B                B'   reads B, gradients add up as P (one all-reduce for all)
"""

from dataclasses import replace

from autoddl.core.graph import Graph, Kind, Op, Tensor

__all__ = ["HUB", "add_hubs", "needed_ops"]

HUB = "autoddl.hub"


def needed_ops(graph: Graph) -> tuple[Op, ...]:
    """The ops that the loss or a buffer update depends on, in order; without gradients, those of all outputs."""
    trains = any(tensor.trained for tensor in graph.tensors)
    wanted = {*graph.outputs[:1 if trains else None], *(new for _, new in graph.updates)}
    kept = []
    for op in reversed(graph.ops):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            kept.append(op)
    return tuple(reversed(kept))


def add_hubs(graph: Graph) -> Graph:
    """The pruned graph with hubs. Tensors keep their positions; the outputs of hubs are added at the end."""
    ops = needed_ops(graph)
    alive = replace(graph, ops=ops, outputs=graph.outputs[:1])
    dependent, consumers = alive.dependent(), alive.consumers()
    shared = {t for t in dependent if len(consumers[t]) > 1}
    tensors, behind = list(graph.tensors), dict[int, int]()
    found: list[Op] = []
    for op in ops:
        for t in op.inputs:
            if t in shared and t not in behind:
                behind[t] = len(tensors)
                name = f"{tensors[t].name}.hub"
                tensors.append(Tensor(name, tensors[t].shape, tensors[t].dtype, Kind.RESULT))
                found.append(Op(name, HUB, (t,), ("self",), (behind[t],), module=op.module, source=op.source))
        found.append(replace(op, inputs=tuple(behind.get(t, t) for t in op.inputs)))
    return replace(alive, tensors=tuple(tensors), ops=tuple(found))
