"""Tables and lines about rules of the user's own."""

from typing import TYPE_CHECKING

from rich.table import Table

from autoddl.cli.tables.table_style import columns
from autoddl.core.graph import TRIED, UNTRIED, Graph, Op, graph_from_text
from autoddl.core.plan import Plan
from autoddl.operators.own_facts import told_by_trials

if TYPE_CHECKING:
    from autoddl.launch.verify_operator import OperatorCheck

__all__ = ["found_by_trying", "operator_table", "what_to_write"]


def operator_table(checked: "OperatorCheck") -> Table:
    """The signatures of a rule, each with what differs from the whole call."""
    table = columns("signature", "ranks", "difference from one device")
    for one in checked.tried:
        table.add_row(one.signature, ", ".join(map(str, one.ranks)), one.difference or "none")
    for name in checked.untried:
        table.add_row(f"dim {name}", "", "not tried: too small in the sample, or no layout of the rule splits it")
    return table


def what_to_write(plan: Plan) -> list[str]:
    """A line for each operator without a rule: what says how its dims correspond, every dim whole so far."""
    if not plan.predicted.fallback or "graph" not in plan.source:
        return []
    graph, found = graph_from_text(plan.source["graph"]), dict[str, str]()
    for op in graph.ops:
        if op.target in plan.predicted.fallback:
            found.setdefault(op.target, f"autoddl.rule({_named(op)}, \"{_whole(op, graph)}\")")
    return list(found.values())


def found_by_trying(plan: Plan) -> list[str]:
    """A line for each operator of which trying it on pieces has found something, or says why not."""
    text = str(plan.source.get("graph", ""))
    if TRIED not in text and UNTRIED not in text:
        return []
    found, reasons = told_by_trials(graph_from_text(text))
    return [*(f"{target} splits as \"{rule}\", found by trying" for target, rule in found.items()),
            *(f"{target}: trying found {'no more' if target in found else 'nothing'}, {reason}"
              for target, reason in reasons.items())]


def _named(op: Op) -> str:
    """`"mylib::fused"`, or the name of a Function's class."""
    library, _, name = op.target.partition(".")
    return name if library == "function" else f'"{library}::{name.removesuffix(".default")}"'


def _whole(op: Op, graph: Graph) -> str:
    """The rule in which no dim may be split."""
    left, right = (", ".join(" ".join("." * len(graph.tensors[t].shape)) or "/" for t in tensors)
                   for tensors in (op.inputs, op.outputs))
    return f"{left} -> {right}"
