"""Finds where rows of a batch meet, so that microbatches compute another loss than the whole batch.

    split       an input with the rows of the batch along dim 0; what an operator makes of such tensors row by row
    partial     a sum, or a mean, of what is split
    meets       an operator that reads one of both and for which no signature of its rule keeps them apart

Only operators whose inputs depend on parameters count: masks are indexed by whole batches, and stay what they are. So
is a mean over tokens that count, sum / number, taken for one of rows: microbatches of as many of them have the same.

The mean of the losses of m microbatches is that of the batch where nothing meets. Of a loss over all pairs of rows it
is not: each microbatch has its own pairs alone. Nor is it of what is computed from a mean, as its root. What a kernel
sums by itself over the rows, as batch norm does, is not looked for.
"""

from collections.abc import Sequence

from autoddl.core.graph import Graph, Kind, Op, graph_from_text
from autoddl.core.layout import B, Layout, Mesh, P, Split
from autoddl.core.plan import Plan
from autoddl.operators.rules.table import has_rule, options
from autoddl.planner.degree_meshes import batch_rows

__all__ = ["met_rows", "where_rows_meet"]

APART = Mesh.parse("rows=2")


def where_rows_meet(graph: Graph) -> Op | None:
    """Returns the first operator in which rows of the batch meet; None where none is found.

    None is found behind an operator without a rule, or in a batch of one row.
    """
    rows, whole = batch_rows(graph), Layout.broadcast(APART)
    states = {k: Layout((Split(0),)) for k, t in enumerate(graph.tensors)
              if t.kind is Kind.INPUT and t.shape and t.shape[0] == rows}
    if rows is None or rows < APART.size:
        return None
    computed = graph.dependent()
    for op in graph.ops:
        given = [states.get(t, whole) for t in op.inputs]
        if all(state == whole for state in given):
            continue
        if not has_rule(op):
            return None
        fitting = [one.outputs for one in options(op, graph, APART)
                   if all(state in (whole, read) for state, read in zip(given, one.inputs, strict=True))]
        if not fitting and _is_mean(op, given):
            fitting = [(Layout((P,)),)]
        if not fitting and any(t in computed and t in states for t in op.inputs):
            return op
        if not fitting:
            continue
        best = min(fitting, key=lambda outputs: sum(2 * (P in layout) + (B in layout) for layout in outputs))
        states |= dict(zip(op.outputs, best, strict=True))
    return None


def met_rows(plan: Plan) -> str:
    """Says what the microbatches of a plan change where rows of the batch meet; "" where they change nothing."""
    if plan.microbatches < 2 or "graph" not in plan.source:
        return ""
    op = where_rows_meet(graph_from_text(plan.source["graph"]))
    if op is None:
        return ""
    where = f"{op.target.split('.')[1]} of {op.module}" if op.module else op.target.split(".")[1]
    return (f"in {where}: each of the {plan.microbatches} microbatches sees its own rows alone there, and the loss is "
            "not that of the whole batch; plan with one microbatch to keep it")


def _is_mean(op: Op, given: Sequence[Layout]) -> bool:
    """Whether a sum over the batch is divided by a number that is counted in it."""
    return op.target == "aten.div.Tensor" and len(given) == 2 and all(state == Layout((P,)) for state in given)
