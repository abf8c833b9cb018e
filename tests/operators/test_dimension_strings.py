"""The rule language: what a dimension string stands for."""

import pytest

from autoddl.core.errors import InputError
from autoddl.operators.rules.dimension_strings import parse, signatures


def texts(rule: str, *shapes: tuple[int, ...]) -> set[str]:
    return {str(signature) for signature in signatures(rule, shapes)}


def test_a_matrix_product_has_the_six_signatures() -> None:
    assert texts("m k, k n -> m n | 0*1", (4, 5), (5, 6), (4, 6)) == {
        "S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P", "P, B -> P", "B, P -> P", "B, B -> B"}


def test_a_bias_is_partial_where_the_output_is() -> None:
    assert texts("m k, n k, n -> m n | 0*1 + 2", (4, 5), (6, 5), (6,), (4, 6)) == {
        "S(0), B, B -> S(0)", "B, S(0), S(0) -> S(1)", "S(1), S(1), P -> P", "P, B, P -> P", "B, P, P -> P",
        "B, B, B -> B"}


def test_only_the_outermost_name_of_a_merged_dim_splits() -> None:
    found = signatures("b (h d:8) -> b h d | 0", ((2, 32), (2, 4, 8)))
    assert {str(s) for s in found} == {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P", "B -> B"}
    assert {s.split: s.divides for s in found if s.split} == {"b": (), "h": (4,)}


def test_names_of_size_one_do_not_stand_outside() -> None:
    assert texts("(a:1 b) -> a b | 0", (6,), (1, 6)) == {"S(0) -> S(1)", "P -> P", "B -> B"}


def test_dots_and_sizes_of_one_are_never_split() -> None:
    assert texts("a . -> a .", (1, 6), (1, 6)) == {"B -> B"}


def test_without_a_form_nothing_is_partial_and_nothing_is_summed_over() -> None:
    assert texts("a b -> a", (4, 6), (4,)) == {"S(0) -> S(0)", "B -> B"}


def test_sum_makes_partial_outputs_of_whole_inputs_only() -> None:
    assert texts("a, a -> / | sum", (4,), (4,), ()) == {"S(0), S(0) -> P", "B, B -> B"}


def test_brackets_ask_for_even_pieces() -> None:
    assert signatures("[a] -> [a]", ((6,), (6,)))[0].divides == (6,)


def test_a_name_only_outputs_have_is_split_there() -> None:
    assert texts("a . -> a b | 0", (4, 1), (4, 6)) == {"S(0) -> S(0)", "B -> S(1)", "P -> P", "B -> B"}


def test_a_name_that_one_output_lacks_is_not_split() -> None:
    assert texts("a b -> a b, a", (4, 6), (4, 6), (4,)) == {"S(0) -> S(0), S(0)", "B -> B, B"}


def test_a_diagonal_is_not_split() -> None:
    assert texts("a a -> a | 0", (6, 6), (6,)) == {"P -> P", "B -> B"}


@pytest.mark.parametrize("rule", ["a b", "a b -> a? | 0", "a -> a | 1"])
def test_malformed_rules_are_refused(rule: str) -> None:
    with pytest.raises(InputError):
        parse(rule)


@pytest.mark.parametrize(("rule", "shapes"), [
    ("a b -> a", ((4, 6), (4,), (4,))),
    ("a b -> a", ((4,), (4,))),
    ("a -> a", ((4,), (5,))),
    ("(a b) -> a b", ((12,), (3, 5))),
])
def test_rules_that_do_not_fit_the_shapes_are_refused(rule: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError):
        signatures(rule, shapes)
