"""Predicts the seconds of a step as a training program runs it: the time line of a plan, and what a program adds.

    step       max(time line, host) + update
    host       seconds of the host per operator and pass, for programs that launch kernels one by one, once more in
               backward for what runs again; a narrow product casts what it reads, and the gradient of what it writes,
               by an operator of its own
    added      bytes that a program moves besides: ZeRO-3 copies what it gathered and what it reduces; one that takes
               padding out around attention reads and writes queries, keys and values, and fills the output with
               zeros before it is copied back; backward does it the other way round; rows are put in the order of
               experts, and some programs add biases and clamp gates there apart (`operators.expert_rows`), turn
               queries and keys by rows of operators, or copy shards of a sequence behind a gather
    hidden     messages that a program sends beside its products: their prices are those of plans (`pricing.beside`)
    exposed    a program that sends nothing beside computation takes the sum of its parts

Of m > 3 microbatches all between the first and the last take the same time: T(m) = T(2) + (m - 2) (T(3) - T(2)).
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB
from autoddl.core.layout import Layout, local_shape
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.recompute import LIGHT
from autoddl.cost_models import Cluster, copy_seconds, elementwise_seconds
from autoddl.cost_models.software import SLOWDOWN, Software
from autoddl.operators.expert_rows import BIASED, CLAMPED, clamped_gates, expert_products
from autoddl.operators.narrow_products import narrow_products
from autoddl.operators.recomputed import recomputed_ops
from autoddl.operators.ring import is_attention
from autoddl.schedule.buckets import parameter_edges
from autoddl.schedule.stage_seconds import stage_seconds
from autoddl.schedule.timeline import predict_timeline
from autoddl.schedule.traffic import traffic_of_activations

__all__ = ["RunParts", "joined_bytes", "ordered_bytes", "run_parts", "run_seconds", "stage_run_seconds"]

FEW = 3
"""Microbatches up to which a time line is made whole."""
JOINED = ("all-gather", "reduce-scatter")
"""Messages of shards, which are joined behind or cut before."""
ROTATED = (20, 24)
"""Bytes a value, forward and backward, of turning queries and keys by rows of operators, beside those of one product
(Megatron-Core, rope_utils.py: halves negated and joined, two products, a sum, and a part that is not turned joined)."""



class RunParts(NamedTuple):
    """Seconds of the device in forward and backward, of the host meanwhile, and of the update."""

    device: float
    host: float
    update: float

    @property
    def seconds(self) -> float:
        """Seconds of the step: the host is ahead of the device, or the device waits for it."""
        return max(self.device, self.host) + self.update


def run_seconds(plan: Plan, graph: Graph, cluster: Cluster, software: Software) -> float:
    """Seconds of a step of a plan without stages; `graph` is the planned one, of one microbatch."""
    return run_parts(plan, graph, cluster, software).seconds


def run_parts(plan: Plan, graph: Graph, cluster: Cluster, software: Software) -> RunParts:
    """Parts of the seconds of `run_seconds`, each of which grows by as much with every layer."""
    parts = plan.microbatches
    line = _line_seconds(plan, graph, cluster, software)
    return RunParts(line + parts * sum(_added(plan, graph, cluster, software)),
                    parts * sum(_operators(plan, graph, cluster, software)) * software.host, plan.predicted.update)


def stage_run_seconds(plan: Plan, graph: Graph, part: Cluster, software: Software, splits: bool) -> StageSeconds:
    """The seconds of a stage of a pipeline as a program runs it; the arguments are those of `stage_seconds`."""
    alone = stage_seconds(plan, graph, part, splits)
    few = replace(plan, microbatches=FEW)
    each = sum(stage_seconds(few, graph, part, splits)[:3])
    line = predict_timeline(few, graph, part, slowdown=SLOWDOWN)
    if "dp" in software.overlaps:
        exposed = min(max(0.0, line.step.seconds - FEW * each), alone.gather + alone.reduce)
        alone = alone._replace(gather=0.0, reduce=exposed)
    forth, back = _added(plan, graph, part, software)
    hosts = [count * software.host for count in _operators(plan, graph, part, software)]
    forward, weight = alone.forward + forth, alone.weight + back * splits
    backward = alone.backward + back * (not splits)
    return alone._replace(forward=max(forward, hosts[0]), backward=max(backward, hosts[1] - weight), weight=weight)


def _line_seconds(plan: Plan, graph: Graph, cluster: Cluster, software: Software) -> float:
    """Seconds of forward and backward of all microbatches, without the update."""
    if "dp" not in software.overlaps:
        return plan.predicted.seconds - plan.predicted.update

    def seconds(parts: int) -> float:
        return predict_timeline(replace(plan, microbatches=parts), graph, cluster, slowdown=SLOWDOWN).step.seconds

    if plan.microbatches <= FEW:
        return seconds(plan.microbatches)
    two, three = seconds(FEW - 1), seconds(FEW)
    return two + (plan.microbatches - FEW + 1) * (three - two)


def _operators(plan: Plan, graph: Graph, cluster: Cluster, software: Software) -> tuple[int, int]:
    """Operators that the host starts in forward, and in backward, where it starts some again."""
    device, again = cluster.device, _again(plan, graph, software)
    count, more = sum(op.target != HUB for op in graph.ops), sum(op.name in again for op in graph.ops)
    if not device.narrow:
        return count, count + more
    narrow = narrow_products(graph).values()
    by_norms = sum(one.normed for one in narrow) if device.by_hand and device.scaling != "current" else 0
    return count + len(narrow) - by_norms, count + more + len(narrow)


def _added(plan: Plan, graph: Graph, cluster: Cluster, software: Software) -> tuple[float, float]:
    """Seconds of a microbatch in which the program moves bytes besides the operators': in forward, and in backward."""
    again = {stored.fqn for stored in plan.stored if stored.regather}
    gathered = sum(prod(local_shape(edge.tensor.shape, edge.conversion.target, plan.mesh))
                   for edge in parameter_edges(plan, graph)
                   if edge.tensor.trained and edge.summed is not None and edge.tensor.fqn in again)
    copied = (software.unpacked + software.packed) * gathered
    forth, back = _unpadded(plan, graph, software) if software.unpads else (0.0, 0.0)
    rowed = _biased(plan, graph, software) if software.biases_apart else (0.0, 0.0)
    turned = _turned(plan, graph, software) if software.rotates_apart else (0.0, 0.0)
    forth, back = (sum(each) for each in zip((forth, back), rowed, turned, strict=True))
    ordered = ordered_bytes(plan, graph, software.pads_rows)
    joined = joined_bytes(plan, graph) if software.joins else (0.0, 0.0)
    first, second = (sum(copy_seconds(cluster.device, each) for each in (ordered, one) if each) for one in joined)
    return (_seconds(cluster, software.unpacked * gathered) + _seconds(cluster, forth) + first,
            _seconds(cluster, copied) + _seconds(cluster, back) + second)


def joined_bytes(plan: Plan, graph: Graph) -> tuple[float, float]:
    """Bytes that are moved in forward and in backward to join what was gathered of activations, or to cut it before.

    NCCL joins buffers along their first dim, which no sequence is: what is read and written is a whole buffer.
    """
    found = {"forward": 0.0, "backward": 0.0}
    for sent in traffic_of_activations(plan, graph, (0,) * len(plan.mesh.axes)):
        found[sent.direction] += 2.0 * sent.nbytes * (sent.kind in JOINED)
    return found["forward"], found["backward"]


def ordered_bytes(plan: Plan, graph: Graph, padded: bool = False) -> float:
    """Bytes that are moved in forward to put rows in the order of experts, and back; backward moves as many.

    Rows that are padded are copied once more at either end, as those that came from other ranks are.
    """
    index, found = plan.index(), 0.0
    for op in graph.ops:
        if (one := expert_products(graph).get(op.name)) is None:
            continue
        decision = index.decisions[op.name]
        layouts = dict(zip(op.inputs, decision.inputs, strict=True))
        experts = local_shape(graph.tensors[one.matrices].shape, layouts[one.matrices], plan.mesh)[0]
        apart = padded or 1 < experts < graph.tensors[one.matrices].shape[0]
        if one.first:
            rows, ahead = _piece(plan, graph, one.rows, layouts[one.rows]), graph.tensors[one.tokens]
            found += rows * (1 + ahead.numel / graph.tensors[one.rows].numel) * (one.tokens != one.rows)
            found += 2 * rows * apart
        if one.last:
            found += 2 * _piece(plan, graph, op.outputs[0], decision.outputs[0]) * apart
    return found


def _biased(plan: Plan, graph: Graph, software: Software) -> tuple[float, float]:
    """Bytes of adding biases behind experts and clamping their gates, in forward and in backward."""
    index, again = plan.index(), _again(plan, graph, software)
    forth = back = 0.0
    known, gates = expert_products(graph), {op.name for op in clamped_gates(graph)}
    for op in graph.ops:
        each = BIASED if op.name in known and known[op.name].last and known[op.name].biased else (
            CLAMPED if op.name in gates else None)
        if each is not None:
            tensor = graph.tensors[op.outputs[0]]
            values = prod(local_shape(tensor.shape, index.decisions[op.name].outputs[0], plan.mesh))
            forth += each[0] * values
            back += (each[1] + each[0] * (op.name in gates & again)) * values
    return forth, back


def _turned(plan: Plan, graph: Graph, software: Software) -> tuple[float, float]:
    """Bytes of turning queries and keys on a rank in forward, and in backward, where some may run again."""
    index, again, forth, back = plan.index(), _again(plan, graph, software), 0.0, 0.0
    for op in graph.ops:
        if is_attention(op):
            decision = index.decisions[op.name]
            values = sum(_piece(plan, graph, t, layout) / graph.tensors[t].itemsize
                         for t, layout in zip(op.inputs[:2], decision.inputs, strict=False))
            forth += ROTATED[0] * values
            back += (ROTATED[1] + ROTATED[0] * (op.name in again)) * values
    return forth, back


def _unpadded(plan: Plan, graph: Graph, software: Software) -> tuple[float, float]:
    """Bytes that are moved around attention in forward, and in backward, where some may run again."""
    index, again = plan.index(), _again(plan, graph, software)
    forth = back = 0.0
    for op in graph.ops:
        if is_attention(op):
            decision = index.decisions[op.name]
            read = sum(_piece(plan, graph, op.inputs[k], decision.inputs[k]) for k in range(3))
            written = _piece(plan, graph, op.outputs[0], decision.outputs[0])
            forth += 2 * read + 3 * written
            back += 2 * written + 3 * read + (2 * read + 3 * written) * (op.name in again)
    return forth, back


def _again(plan: Plan, graph: Graph, software: Software) -> frozenset[str]:
    """The ops whose kernels run again: in programs by hand `light` ones are inside of kernels that backward has."""
    return recomputed_ops(graph, [name for name in plan.recompute if not (
        software.by_hand and name.endswith(f":{LIGHT}"))])


def _piece(plan: Plan, graph: Graph, t: int, layout: Layout) -> float:
    """Bytes of a rank's piece of a tensor."""
    tensor = graph.tensors[t]
    return float(prod(local_shape(tensor.shape, layout, plan.mesh)) * tensor.itemsize)


def _seconds(cluster: Cluster, nbytes: float) -> float:
    return elementwise_seconds(cluster.device, nbytes) if nbytes else 0.0
