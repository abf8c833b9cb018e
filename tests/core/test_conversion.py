"""Conversions: legal steps that lead where they should, at the least price, with hand-counted bytes."""

from itertools import product

import pytest
from sampling import parametrize_or_slow

from autoddl.core.conversion import COLLECTIVES, Step, group_size, is_conversion, payload, ring_bytes, slice_steps
from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split
from autoddl.pricing.routes import Routes, Seconds, routes

GRID = Mesh.parse("a=2,b=2")


def _priced(mesh: Mesh) -> Seconds:
    """Sent bytes, with a little for every step."""
    def seconds(step: Step, full: int, touched: int) -> float:
        return 1.0 + (ring_bytes(step.kind, group_size(step, mesh), full) if step.kind in COLLECTIVES else 0.0)
    return seconds


def _all(shape: tuple[int, ...], mesh: str) -> Routes:
    return routes(shape, 4, Mesh.parse(mesh), _priced(Mesh.parse(mesh)))


@parametrize_or_slow("mesh,shape", [*product(("a=4", "a=2,b=2"), ((8, 8), (9, 7), (8, 12, 2))),
                                     ("a=2,b=2,c=2", (9, 7))], [("a=2,b=2,c=2", (8, 8)), ("a=2,b=2,c=2", (8, 12, 2))])
def test_every_pair_has_a_legal_conversion_of_its_price(mesh: str, shape: tuple[int, ...]) -> None:
    found, on = _all(shape, mesh), Mesh.parse(mesh)
    for (i, source), (j, target) in product(enumerate(found.layouts), repeat=2):
        steps = found.steps(source, target)
        assert is_conversion(steps, source, target), f"{source} -> {target}: {[s.text(on) for s in steps]}"
        cost, here = 0.0, source
        for step in steps:
            cost += _priced(on)(step, payload(step, shape, 4, here, on), 0)
            here = step.after(here)
        assert cost == pytest.approx(found.seconds[i, j])
        assert (not steps) == (source == target)


@pytest.mark.parametrize("mesh", ["a=2,b=2", "a=2,b=2,c=2"])
def test_no_detour_is_cheaper(mesh: str) -> None:
    far = _all((8, 8), mesh).seconds
    for k in range(len(far)):
        assert (far <= far[:, k, None] + far[None, k, :] + 1e-9).all()


@pytest.mark.parametrize(("source", "target", "steps"), [
    ("P P", "B B", ["a+b: P->B"]), ("P P", "S(0) S(0)", ["a+b: P->S(0)"]), ("S(0) S(0)", "B B", ["a+b: S(0)->B"]),
    ("B B", "S(0) S(0)", ["a: B->S(0)", "b: B->S(0)"]), ("S(0) B", "S(1) B", ["a: S(0)->S(1)"]),
    ("B P", "B B", ["b: P->B"]), ("B B", "P B", ["a: B->P"]), ("S(0) B", "P B", ["a: S(0)->P"])])
def test_known_conversions(source: str, target: str, steps: list[str]) -> None:
    found = _all((8, 8), "a=2,b=2").steps(Layout.parse(source), Layout.parse(target))
    assert [step.text(GRID) for step in found] == steps
    assert tuple(Step.parse(text, GRID) for text in steps) == found


def test_an_inner_split_is_never_cut_across() -> None:
    outer = Step((0,), Split(0), B)
    assert not outer.is_legal(Layout.parse("S(0) S(0)"))
    assert outer.is_legal(Layout.parse("S(0) S(1)"))
    assert Step((1,), Split(0), B).is_legal(Layout.parse("S(0) S(0)"))
    assert not Step((0,), B, Split(0)).is_legal(Layout.parse("B S(0)"))
    assert not Step((0, 2), Split(0), B).is_legal(Layout.parse("S(0) S(0) S(0)"))


@pytest.mark.parametrize(("text", "kind", "layout", "count"), [
    ("b: S(0)->B", "all-gather", "B S(0)", 64), ("b: P->S(1)", "reduce-scatter", "B P", 64),
    ("a+b: P->B", "all-reduce", "P P", 64), ("b: P->B", "all-reduce", "S(0) P", 32),
    ("a: S(0)->S(1)", "all-to-all", "S(0) B", 32), ("a: B->S(0)", "slice", "B B", 0), ("a: B->P", "fill", "B B", 0)])
def test_payloads_by_hand(text: str, kind: str, layout: str, count: int) -> None:
    step = Step.parse(text, GRID)
    assert step.kind == kind
    assert payload(step, (8, 8), 4, Layout.parse(layout), GRID) == 4 * count


def test_uneven_payloads_are_padded_to_the_largest_piece() -> None:
    mesh = Mesh.parse("a=4")
    assert payload(Step.parse("a: S(0)->B", mesh), (7, 3), 4, Layout.parse("S(0)"), mesh) == 4 * 8 * 3
    assert payload(Step.parse("a: S(0)->S(1)", mesh), (7, 6), 4, Layout.parse("S(0)"), mesh, (3,)) == 4 * 4 * 2 * 2
    nested = Layout.parse("S(0) S(0)")
    assert payload(Step.parse("b: S(0)->B", GRID), (6,), 4, nested, GRID, (1, 1)) == 4 * 4


def test_a_ring_sends_its_share() -> None:
    assert ring_bytes("all-gather", 4, 100) == 75 and ring_bytes("all-reduce", 4, 100) == 150
    assert group_size(Step((0, 1), P, B), GRID) == 4
    with pytest.raises(InputError, match="gossip"):
        ring_bytes("gossip", 4, 100)


@pytest.mark.parametrize("text", ["a S(0)->B", "a: S(0)", "c: P->B", "a: B->B", "a: P->Q"])
def test_what_is_no_step_says_so(text: str) -> None:
    with pytest.raises(InputError):
        Step.parse(text, GRID)


def test_slices_only_split() -> None:
    steps = slice_steps(GRID, Layout.parse("B B"), Layout.parse("S(1) P"))
    assert [step.text(GRID) for step in steps] == ["a: B->S(1)", "b: B->P"]
