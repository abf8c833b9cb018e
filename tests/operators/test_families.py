"""The table of families: every column against what the code does, and what backward reads against the footprints."""

import importlib
from collections.abc import Iterator

import op_cases
import op_cases_images
import op_cases_shape
import zoo

from autoddl.capture.capture import capture
from autoddl.core import graph as graphs
from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import add_hubs
from autoddl.operators.families import FAMILIES, family_of, flagged
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of, has_footprint
from autoddl.operators.rules.table import RULES
from autoddl.operators.trials.cases import case
from autoddl.operators.work import base, keeps_input, keeps_output

RULE_FILES = ("cut", "elementwise", "experts", "flexible", "images", "index", "loss", "matmul", "nn", "recurrent",
              "reduce", "shape", "spectra")

INDICES = "kept, but whole numbers and masks are no value that a derivative is made of"
MORE = "priced as read in backward, which reads less"
DIFFERENT = {
    ("aten._native_batch_norm_legit_functional", "running_mean"): MORE,
    ("aten._native_batch_norm_legit_functional", "running_var"): MORE,
    ("aten.embedding", "indices"): INDICES, ("aten.index", "*"): INDICES, ("aten.index_select", "index"): INDICES,
    ("aten.where", "condition"): INDICES, ("aten.masked_fill", "mask"): INDICES,
    ("aten.scaled_dot_product_attention", "*"): "with a mask on a processor it is written out and keeps others",
    ("autoddl.attention", "*"): "written out in elementwise calls, which keep probabilities instead",
    ("autoddl.experts", "chosen"): INDICES, ("autoddl.grouped_mm", "ends"): INDICES,
    ("autoddl.experts", "up_bias"): MORE,
    ("autoddl.embedding_bag", "indices"): INDICES, ("autoddl.embedding_bag", "per_sample_weights"): INDICES,
    ("autoddl.token_loss", "logits"): "logarithms of the probabilities are kept in the place of the logits",
    ("aten.cross_entropy_loss", "self"): "logarithms of the probabilities are kept in the place of the logits",
    ("aten.pairwise_distance", "*"): "their difference is kept in the place of both",
    ("aten.l1_loss", "self"): "their difference is kept in the place of both",
    ("aten.l1_loss", "target"): "their difference is kept in the place of both",
    **{(f"aten.{name}", "self"): MORE for name in (
        "addcmul", "ceil", "deg2rad", "fix", "floor", "pad", "positive", "rad2deg", "round", "sign", "special_expit",
        "trunc")},
    **{(name, "weight"): MORE for name in (
        "aten.binary_cross_entropy_with_logits", "aten.cross_entropy_loss", "autoddl.token_loss",
        "autoddl.token_weight")},
    ("aten.binary_cross_entropy_with_logits", "pos_weight"): MORE, ("autoddl.token_weight", "target"): MORE,
}
"""(operator, slot) -> why a footprint keeps another input than the table says; `*` is every slot."""


def test_the_rule_column_names_the_file_of_the_rule() -> None:
    found: dict[str, set[str]] = {}
    for file in RULE_FILES:
        for target in importlib.import_module(f"autoddl.operators.rules.{file}").RULES:
            found.setdefault(".".join(target.split(".")[:2]), set()).add(file)
    assert found == {name: {*family.rule.split("+")} for family in FAMILIES for name in family.names if family.rule}
    assert {".".join(target.split(".")[:2]) for target in RULES} == found.keys()


def test_the_footprint_column_says_which_operators_have_one() -> None:
    for family in FAMILIES:
        for name in family.names:
            assert has_footprint(name) == bool(family.footprint), name


def test_names_stand_in_one_row_and_words_are_known() -> None:
    names = [name for family in FAMILIES for name in family.names]
    assert len(names) == len({*names})
    assert {family.curve for family in FAMILIES} == {
        "add", "multiply", "exponential", "reduce", "normalise", "batch normalise", "gather", "index", "pool", "loss",
        "copy"}
    assert {flag for family in FAMILIES for flag in family.flags} == {
        "view", "cut", "values", "stops", "distance", "convolution", "free"}
    assert {family.reads for family in FAMILIES} == {
        "inputs", "output", "factors", "all", "nothing", "divisor", "weight", "place", "source", "indices", "mask",
        "shape", "matrices"}
    assert family_of("aten.unheard_of").reads == "inputs" and not family_of("aten.unheard_of").flags


def test_the_graph_stops_gradients_where_the_table_says() -> None:
    assert {f"{name}.default" for name in flagged("stops")} == graphs._STOPS


def every_op() -> Iterator[tuple[Graph, Op]]:
    listed = [*op_cases.CASES, *op_cases_images.CASES,
              *(case(t, *args, **kwargs) for t, args, kwargs in op_cases_shape.CASES)]
    for one in listed:
        yield one.graph, one.op
    for made in (zoo.gpt(1), zoo.t5(1), zoo.vgg_bn()):
        graph = add_hubs(capture(*made).graph)
        yield from ((graph, op) for op in graph.ops)


def call_of(graph: Graph, op: Op, flows: frozenset[int]) -> LocalOp:
    tensors = graph.tensors
    inputs = tuple(Value(-1, tensors[t].shape, contiguous(tensors[t].shape), tensors[t].itemsize) for t in op.inputs)
    needs = tuple(k for k, t in enumerate(op.inputs) if t in flows)
    return LocalOp(op, inputs, tuple(tensors[t].shape for t in op.outputs),
                   tuple(tensors[t].itemsize for t in op.outputs), needs, False, True)


def test_footprints_keep_what_backward_reads() -> None:
    compared = 0
    for graph, op in every_op():
        flows = frozenset(t for t in (*op.inputs, *op.outputs) if graph.tensors[t].is_floating)
        if not has_footprint(base(op)) or flows.isdisjoint(op.inputs) or flows.isdisjoint(op.outputs):
            continue
        made = footprint_of(call_of(graph, op, flows))
        kept = {*made.saves, *(k for k, _ in made.copies)}
        for k, slot in enumerate(op.slots):
            if (base(op), slot) not in DIFFERENT and (base(op), "*") not in DIFFERENT:
                assert keeps_input(op, k, graph, flows) == (k in kept), (op.target, slot)
                compared += 1
        if (base(op), "*") not in DIFFERENT and keeps_output(op, flows):
            assert 0 in made.keeps, op.target
    assert compared > 500


def test_what_is_cut_is_a_view() -> None:
    assert flagged("cut") < flagged("view")
