"""Tries the operators of a model that have no rule, and writes into its graph what was found (`trials.probe`).

Calls that are alike are tried once: those of one operator, with equal arguments, dtypes, and shapes whose sizes are
equal in the same places. All calls of a model have `SECONDS` of the processor.
"""

from collections.abc import Hashable
from dataclasses import replace
from time import process_time
from typing import Any

from torch import fx

from autoddl.capture.capture import Captured
from autoddl.capture.fx_tools import with_inputs
from autoddl.core.graph import TRIED, UNTRIED, Graph, Op, graph_from_text
from autoddl.core.plan import Plan
from autoddl.operators.own_facts import tried_rules, with_tried_rules
from autoddl.operators.rules.table import has_rule
from autoddl.operators.trials import probe as trials
from autoddl.operators.trials.cases import Hole
from autoddl.operators.trials.probe import Call, Probed, probe

__all__ = ["SECONDS", "planned_by", "with_trials"]

SECONDS = 5.0
"""Seconds of the processor for all operators of a model."""


def with_trials(captured: Captured) -> Graph:
    """The graph in which every op without a rule says what trying it has found; itself where all have one."""
    nodes = {node.name: node for node in captured.program.graph.nodes}
    known: dict[Hashable, Probed] = {}
    end = process_time() + SECONDS
    ops = []
    for op in captured.graph.ops:
        if not has_rule(op):
            key = _key(op, captured.graph)
            if key not in known:
                known[key] = _tried(op, nodes[op.name], captured.graph, end - process_time())
            op = replace(op, args=(*op.args, *_said(known[key])))
        ops.append(op)
    return replace(captured.graph, ops=tuple(ops)) if known else captured.graph


def planned_by(captured: Captured, plan: Plan) -> Captured:
    """The captured model with the rules that trying found when it was planned: a rank does not try again."""
    text = str(plan.source.get("graph", ""))
    found = tried_rules(graph_from_text(text)) if TRIED in text else {}
    return replace(captured, graph=with_tried_rules(captured.graph, found)) if found else captured


def _said(found: Probed) -> list[tuple[str, str]]:
    return [(name, text) for name, text in ((TRIED, found.text), (UNTRIED, found.reason)) if text]


def _tried(op: Op, node: fx.Node, graph: Graph, left: float) -> Probed:
    """Tries a call for at most `left` seconds."""
    if left <= 0:
        return Probed("", f"the {SECONDS:g} s of the model were over")
    return probe(_call(op, node, graph), min(left, trials.SECONDS))


def _call(op: Op, node: fx.Node, graph: Graph) -> Call:
    args, kwargs = with_inputs(node, {slot: Hole(k) for k, slot in enumerate(op.slots)})
    return Call(node.target, op.target, args, kwargs, tuple(graph.tensors[t] for t in op.inputs),
                tuple(graph.tensors[t] for t in op.outputs))


def _key(op: Op, graph: Graph) -> Hashable:
    """Says on what the trial of a call depends: of sizes, which of them are equal."""
    number: dict[int, int] = {1: 0}
    tensors: list[Any] = [(graph.tensors[t].dtype, tuple(number.setdefault(n, len(number))
                                                         for n in graph.tensors[t].shape))
                          for t in (*op.inputs, *op.outputs)]
    return op.target, op.slots, op.args, tuple(tensors)
