"""Seconds of a published run's step, from the prices of its parts.

    stage      F = layers max(forward + sent, host * operators),  B, W likewise; full recomputation adds F to B,
               selective the attention core
    pipeline   the schedule's time line with embedding and head at its ends and the activations sent between
    replicas   gradients reduced (and parameters gathered) once, beside the last backward where the program does that;
               ZeRO-3: two gathers and a reduce-scatter of every layer and microbatch beside its computation
    update     bytes that clipping and the optimizer move
    overlap    max(a, b) + (SLOWDOWN - 1) min(a, b): what runs at once slows both (Miao et al. 2022, Galvatron, 3.4)
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.pipelines import pipeline
from autoddl.errors import InputError
from autoddl.schedules import generate
from autoddl.validate_layer import Asked, Part, part
from autoddl.validate_model import Shape
from autoddl.validate_places import Software, attention_slowdown, cluster_of, software_of
from autoddl.validate_runs import Run

__all__ = ["Step", "Unpriced", "parts_of", "schedule_of", "stage_layers", "step"]

SLOWDOWN = 1.2
"""What computation and communication at once lose to each other: within the 1.1 to 1.3 of Galvatron (section 3.4),
chosen with the published runs in view."""


class Unpriced(Exception):
    """Why a run has no price."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step and its parts."""

    seconds: float
    computed: float
    pipeline: float
    replicas: float
    update: float


def shape_of(run: Run, software: Software, microbatch: int) -> Shape:
    """The layer of a run; experts see the microbatches of all ranks that share them."""
    if not run.precision:
        raise Unpriced("the precision is not stated")
    if "MLA" in run.workload:
        raise Unpriced("multi-head latent attention is no layer of this table")
    pad = 128 * run.tp
    together = _outer_experts(run)
    if run.experts and (run.seq * run.top) % run.experts:
        raise Unpriced(f"{run.seq} tokens do not go evenly to {run.experts} experts")
    return Shape(run.hidden, run.heads, run.groups, run.ffn, -(-run.vocab // pad) * pad, microbatch * together, run.seq,
                 run.gated or run.experts > 0, software.attention != "products", software.dropout, not run.gated,
                 run.experts, run.top, "relu" if "ReLU" in run.workload else "gelu",
                 dtype="float16" if run.precision.startswith("fp16") else "bfloat16")


def _outer_experts(run: Run) -> int:
    """Replicas among which experts are cut; what is beyond them is cut over tp."""
    return gcd(run.ep, run.dp) if run.experts else 1


def parts_of(run: Run, microbatch: int) -> dict[str, Part]:
    """Prices of layer, embedding and head."""
    software, shape = software_of(run), shape_of(run, software_of(run), microbatch)
    cluster = cluster_of(run, _outer_experts(run) * run.cp * run.tp)
    plain = replace(shape, batch=microbatch, experts=0, top=0)
    low = "float8_e4m3fn" if run.precision.startswith("fp8") else ""
    inner, mesh = _mesh(run, 1), _mesh(run, _outer_experts(run))
    ends = "tp" if run.experts and run.ep > run.dp else ""
    layer = Asked("layer", shape, mesh, run.sequence, low, software.fuses, attention_slowdown(run, software), ends)
    return {"layer": part(layer, cluster),
            "embedding": part(Asked("embedding", plain, inner, run.sequence, "", software.fuses), cluster),
            "head": part(Asked("head", plain, inner, run.sequence, "", software.fuses), cluster)}


def _mesh(run: Run, experts: int) -> str:
    """The ranks that a layer is cut among, as text."""
    axes = [f"{name}={size}" for name, size in (("ep", experts), ("cp", run.cp), ("tp", run.tp)) if size > 1]
    return ",".join(axes) or "tp=1"


def schedule_of(run: Run) -> tuple[str, int]:
    """The schedule's name as `schedules.generate` reads it, and chunks per rank."""
    text = run.schedule.lower()
    if run.pp == 1:
        return "1f1b", 1
    if text.startswith("zb-1p"):
        return "zb-h1", 1
    if text.startswith("zb-2p"):
        return "zb-h2", 1
    chunks = run.chunks or max(1, -(-run.layers // run.pp))
    if chunks > 1:
        return f"interleaved:{chunks}", chunks
    return "1f1b", 1


def stage_layers(run: Run) -> tuple[int, ...]:
    """Layers per stage; where they do not divide, embedding and head count as a layer each."""
    stages = run.pp * schedule_of(run)[1]
    if run.layers % stages == 0:
        return (run.layers // stages,) * stages
    if (run.layers + 2) % stages == 0:
        each = (run.layers + 2) // stages
        return tuple(each - (s == 0) - (s == stages - 1) for s in range(stages))
    low, more = divmod(run.layers, stages)
    return tuple(low + (s < more) for s in range(stages))


def overlapped(a: float, b: float) -> float:
    """Seconds of two at once."""
    return max(a, b) + (SLOWDOWN - 1) * min(a, b)


def _layer(run: Run, software: Software, one: Part) -> tuple[float, float, float]:
    """F, B and W of one layer with what it sends."""
    def beside(compute: float, sent: float) -> float:
        return overlapped(compute, sent) if "tp" in software.overlaps and run.sequence else compute + sent

    ring = one.context * (0.0 if "cp" in software.overlaps else 1.0)
    forward = max(software.host * one.calls, beside(one.forward, one.sent_forward) + ring / 3)
    both = beside(one.backward + one.weight, one.sent_backward) + ring * 2 / 3
    backward = max(software.host * one.backward_calls, both) - one.weight
    if run.recompute.startswith("full"):
        backward += forward
    elif "core" in run.recompute:
        backward += one.core
    elif run.recompute.startswith("selective"):
        backward += (forward - one.core) / 2
    return forward, backward, one.weight


def step(run: Run, microbatch: int) -> Step:
    """Seconds of one step with this microbatch."""
    software, cluster, parts = software_of(run), cluster_of(run), parts_of(run, microbatch)
    count = run.batch // (run.dp * microbatch)
    ends = [_layer(replace(run, recompute=""), software, parts[name]) for name in ("embedding", "head")]
    one = _layer(run, software, parts["layer"])
    if run.zero == 3 and run.dp > 1:
        one, ends = _gathered(run, software, cluster, parts, one, ends)
    if count > 1:
        one = (*one[:2], one[2] + elementwise_seconds(cluster.device, _accumulated(run, software, parts["layer"])))
    layers = stage_layers(run)
    stages = [[n * seconds for n in layers] for seconds in one]
    for times, first, last in zip(stages, *ends, strict=True):
        times[0] += first
        times[-1] += last
    line = _pipeline(run, cluster, tuple(map(tuple, stages)), count, microbatch)
    window = (sum(stages[1]) + sum(stages[2])) / run.pp
    replicas = 0.0 if run.zero == 3 else _replicas(run, software, cluster, parts, window, sum(stages[0]) / run.pp)
    update = _update(run, software, cluster, parts)
    computed = count * sum(map(sum, stages)) / run.pp
    return Step(line + replicas + update, computed, line, replicas, update)


def _accumulated(run: Run, software: Software, one: Part) -> float:
    """Bytes that adding a microbatch's gradients of a layer to the others' moves: both read, the sum written."""
    return one.values * (2 + 2 * software.gradient) / (run.dp if run.zero == 3 else 1)


def _gathered(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part], one: tuple[float, ...],
              ends: list[tuple[float, float, float]]
              ) -> tuple[tuple[float, float, float], list[tuple[float, float, float]]]:
    """ZeRO-3: the gather beside the forward, a gather and the reduce-scatter beside the backward, per layer."""
    group = Group(((run.dp * run.cp, run.tp),))

    def with_(times: tuple[float, ...], values: float) -> tuple[float, float, float]:
        forward, backward, weight = times
        gather = collective(cluster, "all-gather", group, 2 * values).seconds
        scatter = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
        if run.recompute.startswith("full") and not backward:
            gather = 0.0
        return (overlapped(forward, gather), overlapped(backward + weight, gather + scatter) - weight, weight)

    found = [with_(times, parts[name].values) for name, times in zip(("embedding", "head"), ends, strict=True)]
    return with_(one, parts["layer"].values), found


def _boundaries(run: Run, cluster: Cluster, microbatch: int, chunks: int) -> tuple[float, ...]:
    """Seconds to send x from each stage to the next."""
    width = run.tp if run.sequence or run.tp > 1 else 1
    nbytes = 2.0 * microbatch * run.seq * run.hidden / (run.cp * width)
    stride, node = run.dp * run.tp * run.cp, cluster.levels[0].size
    far = collective(cluster, "send", Group(((run.pp, stride),)), nbytes).seconds
    near = collective(cluster, "send", Group(((2, stride),)), nbytes).seconds if 2 * stride <= node else far
    stages = run.pp * chunks
    return tuple(near if (s % run.pp) * stride // node == ((s + 1) % run.pp) * stride // node else far
                 for s in range(stages - 1))


def _pipeline(run: Run, cluster: Cluster, stages: tuple[tuple[float, ...], ...], count: int, microbatch: int) -> float:
    """The time line's end; where the optimizer of a zero-bubble schedule does not wait, the longest rank's."""
    forward, backward, weight = stages
    if run.pp == 1:
        return count * sum(map(sum, stages))
    name, chunks = schedule_of(run)
    if chunks > 1 and count % run.pp:
        raise Unpriced(f"{count} microbatches are no multiple of {run.pp} stages, which interleaving needs")
    return _line(name, run.pp, count, forward, backward, weight, _boundaries(run, cluster, microbatch, chunks))


@lru_cache(maxsize=4_000)
def _line(name: str, ranks: int, count: int, forward: tuple[float, ...], backward: tuple[float, ...],
          weight: tuple[float, ...], between: tuple[float, ...]) -> float:
    try:
        line = pipeline(generate(name, ranks, count), forward, backward, weight, between)
    except InputError as error:
        raise Unpriced(str(error)) from None
    if not name.startswith("zb"):
        return line.makespan
    spans = [[at for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
              if task.ranks == (rank,) for at in (start, end)] for rank in range(ranks)]
    return max(max(span) - min(span) for span in spans)


def held_values(run: Run, parts: dict[str, Part]) -> tuple[float, float]:
    """Parameters of the rank that has most: (replicated over dp, cut among experts' ranks)."""
    layers, one = stage_layers(run), parts["layer"]
    ends = [0.0] * run.pp
    ends[0] += parts["embedding"].values
    ends[-1] += parts["head"].values
    _, most, end = max((count * one.values + end, count, end) for count, end in
                       ((sum(layers[rank::run.pp]), ends[rank]) for rank in range(run.pp)))
    return most * (one.values - one.expert_values) + end, most * one.expert_values


def _replicas(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part], backward: float, forward: float
              ) -> float:
    """Seconds of gradients and parameters among replicas that nothing hides."""
    dense, expert = held_values(run, parts)
    outer = _outer_experts(run)
    exposed = 0.0
    for values, ways, stride in ((dense, run.dp * run.cp, run.tp),
                                 (expert, run.dp * run.cp // outer, run.tp * outer)):
        if ways < 2 or not values:
            continue
        group = Group(((ways, stride),))
        if run.zero:
            reduce = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
            gather = collective(cluster, "all-gather", group, 2 * values).seconds
        else:
            reduce, gather = collective(cluster, "all-reduce", group, software.gradient * values).seconds, 0.0
        if "dp" in software.overlaps:
            reduce = overlapped(backward, reduce) - backward
            gather = overlapped(forward, gather) - forward
        exposed += reduce + gather
    return exposed


def _update(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part]) -> float:
    """Bytes of clipping and optimizer over the bandwidth."""
    dense, expert = held_values(run, parts)
    shard = run.dp * run.cp if run.zero else 1
    part_of = run.dp * run.cp // _outer_experts(run) if run.zero else 1
    return elementwise_seconds(cluster.device, software.update * (dense / shard + expert / part_of))
