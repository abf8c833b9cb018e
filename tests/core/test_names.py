"""Names that differ in numbers alone are one row, which stands for exactly these names."""

import random
from itertools import product

from autoddl.core.names import fold_names, fold_rows, number_ranges


def test_numbers_become_ranges_at_every_place() -> None:
    names = ["stem.weight", *(f"a.{i}.{j}.weight" for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))), "head"]
    assert fold_names(names) == {"stem.weight": ("stem.weight",), "a.0-1.0-1.weight": tuple(names[1:5]),
                                 "a.1.2.weight": ("a.1.2.weight",), "head": ("head",)}
    assert number_ranges([5, 0, 1, 2, 2]) == "0-2,5"


def test_rows_of_other_values_and_names_with_digits_in_words_stay_apart() -> None:
    rows = [("h.0.fc1", 1), ("h.0.fc2", 1), ("h.1.fc1", 2), ("h.2.fc1", 1)]
    assert fold_rows(rows) == [("h.0,2.fc1", 1, ["h.0.fc1", "h.2.fc1"]), ("h.0.fc2", 1, ["h.0.fc2"]),
                               ("h.1.fc1", 2, ["h.1.fc1"])]
    assert fold_rows([]) == []


def test_a_row_stands_for_exactly_its_names() -> None:
    rng = random.Random(0)
    for _ in range(300):
        names = [f"m.{i}.b.{j}.{k}" for i, j, k in product(range(3), range(3), range(2)) if rng.random() < 0.6]
        rows = [(name, rng.randrange(2)) for name in names]
        folded = fold_rows(rows)
        assert sorted((name, value) for _, value, members in folded for name in members) == sorted(rows)
        for text, _, members in folded:
            assert sorted(members) == sorted(_unfolded(text))


def _unfolded(text: str) -> list[str]:
    """The names of a folded one: every combination of its numbers."""
    parts = [[part] if part.isalpha() else _numbers(part) for part in text.split(".")]
    return [".".join(one) for one in product(*parts)]


def _numbers(text: str) -> list[str]:
    ends = [span.split("-") for span in text.split(",")]
    return [str(n) for span in ends for n in range(int(span[0]), int(span[-1]) + 1)]
