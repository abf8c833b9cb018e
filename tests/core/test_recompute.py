"""Policies of recomputation as text, and the blocks that they name."""

import pytest

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.recompute import (
    blocks_of,
    check_policy,
    policy_blocks,
    policy_text,
    recomputes_more,
    select_blocks,
)


def chain(*modules: str) -> Graph:
    """A chain of ops, one in each of the modules, which all read one parameter."""
    tensors = [Tensor("w", (4,), "float32", Kind.PARAMETER, "w", trained=True),
               Tensor("x", (4,), "float32", Kind.INPUT, "x")]
    ops = []
    for i, module in enumerate(modules):
        end = len(tensors)
        ops.append(Op(f"op{i}", "aten.mul.Tensor", (end - 1, 0), ("self", "other"), (end,), (), module))
        tensors.append(Tensor(f"t{i}", (4,), "float32", Kind.RESULT))
    return Graph(tuple(tensors), tuple(ops), (len(tensors) - 1,))


STACK = chain("", *(f"h.{i}.{part}" for i in range(6) for part in ("norm", "mlp.0", "mlp.1")), "head")


def test_a_block_is_the_outermost_member_of_a_list() -> None:
    assert [block.name for block in blocks_of(STACK)] == [f"h.{i}" for i in range(6)]
    assert [(block.start, block.end) for block in blocks_of(STACK)] == [(1 + 3 * i, 4 + 3 * i) for i in range(6)]


def test_parts_that_run_interleaved_and_single_ops_are_no_blocks() -> None:
    assert [b.name for b in blocks_of(chain("a.0.x", "a.1.x", "a.0.y", "a.1.y", "b.0.x", "b.0.y", "c.0"))] == ["b.0"]


@pytest.mark.parametrize("policy, names", [
    ("none", []), ("full", [0, 1, 2, 3, 4, 5]), ("every-2", [0, 2, 4]), ("every-4", [0, 4]), ("first-2", [0, 1]),
    ("first-9", [0, 1, 2, 3, 4, 5]), ("h.5+h.1", [1, 5])])
def test_a_policy_names_blocks(policy: str, names: list[int]) -> None:
    found = policy_blocks(STACK, policy)
    assert found == tuple(f"h.{i}" for i in names)
    assert policy_blocks(STACK, policy_text(found)) == found
    if "-" in policy:
        assert policy_blocks(STACK, f"{policy}:selective") == tuple(f"{name}:selective" for name in found)


def test_a_block_has_one_level() -> None:
    mixed = policy_blocks(STACK, "h.3+h.1:selective+h.4:full")
    assert mixed == ("h.1:selective", "h.3", "h.4") and policy_blocks(STACK, policy_text(mixed)) == mixed
    assert policy_blocks(STACK, "selective") == tuple(f"h.{i}:selective" for i in range(6))
    for names in (("h.1", "h.1:selective"), ("h.1:some",)):
        with pytest.raises(InputError, match=r"block h\.1 is recomputed at one level"):
            select_blocks(STACK, names)


def test_policies_are_ordered_by_what_they_recompute() -> None:
    assert recomputes_more("full", "every-2") and recomputes_more("every-2", "every-4")
    assert recomputes_more("first-3", "first-2") and recomputes_more("h.0", "none")
    for more, less in (("full", "selective"), ("selective", "first-2:selective"), ("every-2", "every-4:selective"),
                       ("selective", "h.0:selective+h.2:selective"), ("h.0+h.1", "h.0:selective"), ("every-1", "h.0")):
        assert recomputes_more(more, less), (more, less)
    for more, less in (("every-3", "every-2"), ("first-2", "first-3"), ("none", "full"), ("h.0", "h.1"),
                       ("first-8", "every-2"), ("selective", "first-1"), ("every-2:selective", "every-2"),
                       ("selective", "h.0"), ("h.0:selective", "h.0"), ("every-2", "h.0")):
        assert not recomputes_more(more, less), (more, less)


@pytest.mark.parametrize("text", ["some", "every-0", "first-", "full-2", "head", "", "none:selective", "h.0:",
                                  "h.0:some", "full:selective"])
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="there is no recomputation"):
        check_policy(text)


def test_a_model_without_such_blocks_says_so() -> None:
    with pytest.raises(InputError, match="no list of modules"):
        policy_blocks(chain("", "head"), "full")
    with pytest.raises(InputError, match=r"h\.7 is no block of this model.*h\.0, h\.1"):
        select_blocks(STACK, ("h.7",))
