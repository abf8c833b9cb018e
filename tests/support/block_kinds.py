"""Counts the kinds of blocks of a plan."""

from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of

__all__ = ["kinds"]


def kinds(plan: Plan) -> int:
    """How many different blocks a plan has, by what is decided in them."""
    graph, found = add_hubs(graph_from_text(plan.source["graph"])), set()
    decisions, levels = plan.index().decisions, {name.partition(":")[0]: name for name in plan.recompute}
    for block in blocks_of(graph):
        ops = [decisions[op.name] for op in graph.ops[block.start:block.end]]
        found.add((tuple((one.inputs, one.outputs, one.gradient) for one in ops),
                   tuple((one.fqn.removeprefix(block.name), one.layout, one.split) for one in plan.stored
                         if one.fqn.startswith(f"{block.name}.")),
                   levels.get(block.name, "").removeprefix(block.name) if block.name in levels else "none"))
    return len(found)
