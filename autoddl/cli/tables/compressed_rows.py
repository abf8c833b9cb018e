"""The rows of a plan's figures about coded messages and sparse sums: bytes with and without, and what that costs."""

from math import inf

from autoddl.core.codecs import BLOCK, CODECS
from autoddl.core.graph import Graph, graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.sparse import RENEWED, SparseRule
from autoddl.core.stages import cut_graph
from autoddl.cost_models.units import show_bytes
from autoddl.schedule.moved_bytes import moved_bytes
from autoddl.schedule.stage_lanes import copies_of, stage_traffic
from autoddl.schedule.traffic import traffic

__all__ = ["compressed_rows", "sparse_rows"]


def compressed_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row where messages are coded, or might have been; none otherwise."""
    words = plan.source.get("compress") or plan.source.get("asked", {}).get("compress")
    asked = ", ".join(words or plan.codecs)
    if not plan.codecs:
        return [("compressed", f"nothing: {asked} would be faster nowhere")] if asked else []
    sent = ""
    if "graph" in plan.source:
        graph = graph_from_text(plan.source["graph"])
        with_, without = (show_bytes(_sent(each, graph)) for each in (plan, plan.without_codecs()))
        sent = f": rank 0 sends {with_} a step, not {without}" if with_ != without else \
            f": almost nothing, as coding the rest takes longer than it saves; rank 0 sends {with_} a step"
    return [("compressed", f"{asked}{sent}"), *(("", _error(name)) for name in plan.codecs)]


def sparse_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row where sums of gradients are sparse, or might have been; none otherwise."""
    asked, found = plan.source.get("sparse") or plan.source.get("asked", {}).get("sparse"), plan.sparse_sums
    rule = SparseRule.parse(asked) if asked else next(iter(found.values()), None)
    if rule is None:
        return []
    count, sent = len(found), ""
    if not count:
        return [("sparse", f"nothing: sums of the largest {100 * rule.share:.3g}% would be faster nowhere")]
    said = f"the largest {100 * rule.share:.3g}% of the values of "
    if "graph" in plan.source:
        graph, whole = graph_from_text(plan.source["graph"]), plan.without_codecs(sparse_alone=True)
        with_, without = (show_bytes(_sent(each, graph)) for each in (plan, whole))
        sent = f": rank 0 sends {with_} a step, not {without}" if with_ != without else \
            f": none of them on rank 0, which sends {with_} a step"
    return [("sparse", f"{said}{count} gradients{sent}"),
            ("", "the rest is kept and added to the next step's gradient; a step may send half as much again, and "
                 f"more in every {RENEWED}nd, which computes thresholds"),
            *(("", text) for text in _remedies(rule))]


def _remedies(rule: SparseRule) -> list[str]:
    """Texts that say what a rule does for the loss."""
    found = []
    if rule.warmup:
        found.append(f"the first {rule.warmup} steps add up whole; the seconds above are those of later ones")
    if rule.stairs:
        found.append(f"the next {rule.falls} steps send the largest {', '.join(f'{100 * s:.3g}%' for s in rule.stairs)}"
                     ", each for as many; the seconds above are those of later ones")
    if rule.momentum:
        found.append(f"velocities with a momentum of {rule.momentum:g} add up in place of gradients: give the "
                     "optimizer none")
    return found


def _sent(plan: Plan, graph: Graph) -> float:
    """Bytes that rank 0 sends in a step; `graph` is the captured one."""
    if plan.pipeline is None:
        return sum(moved_bytes(plan, one.kind, one.axes, one.nbytes) for one in traffic(plan, add_hubs(graph)))
    stages, parts = plan.pipeline.stages, cut_graph(graph, plan.pipeline.cuts)
    own = sum(_sent(stages[one.stage].plan, parts[one.stage].graph) for one in copies_of(plan.pipeline)
              if one.first == 0)
    return own + sum(one.nbytes for one in stage_traffic(plan, graph, 0) if one.kind == "send")


def _error(name: str) -> str:
    codec = CODECS[name]
    if codec.lossless:
        return f"{name}: every value comes back as it was"
    if name == "bfloat16":
        return f"{name}: a value is off by at most {codec.error:.2%} of itself, each time that it is sent"
    if codec.error == inf:
        return f"{name}: a value is off by at most 0.05% of itself, and infinite above 65504"
    return (f"{name}: a value is off by at most {codec.error:.2g} of the largest in its block of "
            f"{BLOCK if codec.group == 1 else codec.group:,}, each time that it is sent")
