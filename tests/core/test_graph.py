"""The graph as a value: who writes, who reads, what carries a gradient, and a fingerprint that notices changes."""

from dataclasses import replace

import pytest

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, Tensor


def tensor(name: str, kind: Kind = Kind.RESULT, dtype: str = "float32", trained: bool = False) -> Tensor:
    return Tensor(name, (2, 3), dtype, kind, name, (), trained)


def graph() -> Graph:
    """ids -> row of w; mask of ids alone; masked row; its detached copy and its sum; the counter of calls."""
    tensors = (tensor("w", Kind.PARAMETER, trained=True), tensor("count", Kind.BUFFER, "int64"),
               tensor("ids", Kind.INPUT, "int64"), tensor("row"), tensor("mask", dtype="bool"), tensor("masked"),
               tensor("still"), tensor("loss"), tensor("next", dtype="int64"))
    ops = (Op("row", "aten.embedding.default", (0, 2), ("weight", "indices"), (3,), (("padding_idx", -1),)),
           Op("mask", "aten.ne.Scalar", (2,), ("self",), (4,), (("other", 0),)),
           Op("masked", "aten.mul.Tensor", (3, 4), ("self", "other"), (5,)),
           Op("still", "aten.detach.default", (5,), ("self",), (6,)),
           Op("loss", "aten.add.Tensor", (5, 6), ("self", "other"), (7,), (("alpha", 1),)),
           Op("next", "aten.add.Tensor", (1,), ("self",), (8,), (("other", 1), ("alpha", 1))))
    return Graph(tensors, ops, (7,), ((1, 8),))


def test_who_writes_and_who_reads() -> None:
    assert graph().producers() == {3: 0, 4: 1, 5: 2, 6: 3, 7: 4, 8: 5}
    consumers = graph().consumers()
    assert consumers[2] == ((0, 1), (1, 0)) and consumers[5] == ((3, 0), (4, 0)) and consumers[7] == ()


def test_the_cone_depends_on_no_parameter() -> None:
    assert set(range(9)) - graph().dependent() == {1, 2, 4, 8}


def test_gradients_stop_at_detach_and_integers() -> None:
    assert graph().differentiable() == {0, 3, 5, 7}


def test_no_gradient_comes_back_from_what_the_loss_does_not_read_as_a_number() -> None:
    """A teacher behind a detach, a choice behind an argmin, a shape alone, a statistic for a buffer."""
    tensors = (tensor("w", Kind.PARAMETER, trained=True), tensor("v", Kind.PARAMETER, trained=True), tensor("row"),
               tensor("taught"), tensor("still"), tensor("far"), tensor("nearest", dtype="int64"), tensor("zeros"),
               tensor("mean"), tensor("code"), tensor("sum"), tensor("loss"))
    ops = (Op("row", "aten.relu.default", (0,), ("self",), (2,)),
           Op("taught", "aten.mul.Tensor", (2, 1), ("self", "other"), (3,)),
           Op("still", "aten.detach.default", (3,), ("self",), (4,)),
           Op("far", "aten.sub.Tensor", (2, 1), ("self", "other"), (5,)),
           Op("nearest", "aten.argmin.default", (5,), ("self",), (6,)),
           Op("zeros", "aten.zeros_like.default", (5,), ("self",), (7,)),
           Op("mean", "aten.mean.default", (2,), ("self",), (8,)),
           Op("code", "aten.index_select.default", (4, 6), ("self", "index"), (9,)),
           Op("sum", "aten.add.Tensor", (2, 7), ("self", "other"), (10,)),
           Op("loss", "aten.add.Tensor", (10, 9), ("self", "other"), (11,)))
    assert Graph(tensors, ops, (11,), ((0, 8),)).differentiable() == {0, 2, 10, 11}


def test_arguments_and_slots() -> None:
    op = graph().ops[0]
    assert op.arg("padding_idx") == -1 and op.slot("indices") == 1 and op.slot("bias") is None
    with pytest.raises(InputError, match=r"has no argument 'sparse'; it has \['padding_idx'\]"):
        op.arg("sparse")


def test_sizes() -> None:
    assert tensor("x").nbytes == 24 and tensor("m", dtype="bool").nbytes == 6
    assert tensor("h", dtype="bfloat16").is_floating and not tensor("i", dtype="int64").is_floating
    with pytest.raises(InputError, match="has dtype float3"):
        _ = tensor("odd", dtype="float3").nbytes


def test_fingerprint_notices_changes_that_matter() -> None:
    first, ops = graph(), graph().ops
    moved = replace(first, ops=(replace(ops[0], source="other.py:3", module="m"), *ops[1:]))
    changed = replace(first, ops=(replace(ops[0], args=(("padding_idx", 0),)), *ops[1:]))
    assert first.fingerprint() == graph().fingerprint() == moved.fingerprint() != changed.fingerprint()
