"""Ring attention: every layout of it against one device, what it sends, when it waits, and what a rank holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from held import measured
from op_cases import SDPA, f, truths
from sampling import parametrize_or_slow
from torch import Tensor

from autoddl.core.graph import SEEN_SHARES
from autoddl.core.layout import Mesh, Split
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.kernels.site import Exchange, Shift, Site
from autoddl.operators.kernels.table import lower
from autoddl.operators.ring import SHIFT, exposed_seconds, ring_turns
from autoddl.operators.rules.nn import inner_collectives
from autoddl.operators.rules.table import Option, options
from autoddl.operators.trials.cases import Case, case
from autoddl.operators.trials.trial import _Threads, check
from autoddl.operators.work import work


def documents(length: int, ends: tuple[int, ...]) -> Tensor:
    """The mask of documents that lie one behind the other: a token sees those of its own document up to itself."""
    which = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)
    return (which[:, None] == which).tril()


def window(length: int, size: int) -> Tensor:
    """The mask of a sliding window: a token sees itself and those before it, `size` in all."""
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - size)


FLEX = "autoddl.flex_attention"
NUMBER = 8
"""Bytes of the numbers that stand in for a loss and its gradient."""
FULL = case(SDPA, f(3, 4, 8, 4), f(3, 4, 8, 4), f(3, 4, 8, 4))
CAUSAL = case(SDPA, f(3, 4, 16, 4), f(3, 2, 16, 4), f(3, 2, 16, 4), None, 0.0, True, enable_gqa=True)
CASES = [FULL, CAUSAL,
         case(SDPA, f(3, 4, 24, 4), f(3, 4, 24, 4), f(3, 4, 24, 4), None, 0.0, True, scale=0.3),
         case(SDPA, f(3, 4, 8, 4), f(3, 2, 16, 4), f(3, 2, 16, 6), enable_gqa=True),
         case(SDPA, f(3, 4, 16, 4), f(3, 4, 16, 4), f(3, 4, 16, 4), documents(16, (3, 11))),
         case(SDPA, f(1, 4, 16, 4), f(1, 2, 16, 4), f(1, 2, 16, 4), window(16, 3), enable_gqa=True),
         case(SDPA, f(3, 4, 8, 4), f(3, 4, 8, 4), f(3, 4, 8, 4), truths(3, 1, 8, 8)),
         case(SDPA, f(3, 4, 8, 4), f(3, 4, 8, 4), f(3, 4, 8, 4), f(1, 4, 8, 8)),
         case(SDPA, f(3, 4, 8, 4), f(3, 4, 8, 4), f(3, 4, 8, 4), f(3, 1, 1, 8))]
SAME = "bitwise_and(ge(q, k), eq(x0[b, q], x0[b, k]))"
"""The mask of documents that are packed into one row."""
NUMBERS = torch.arange(16).div(5, rounding_mode="floor").expand(3, 16).contiguous()
FLEXIBLE = [case(FLEX, f(3, 4, 16, 4), f(3, 2, 16, 4), f(3, 2, 16, 6), [NUMBERS], mask=SAME, lse=True),
            case(FLEX, f(1, 4, 16, 4), f(1, 4, 16, 4), f(1, 4, 16, 4), [f(4), f(31), f(16)], mask="gt(q, k)",
                 score="sub(add(s, x1[add(sub(q, k), 15)]), mul(x0[h], x2[q]))"),
            case(FLEX, f(3, 4, 8, 4), f(3, 4, 16, 4), f(3, 4, 16, 6), [f(16)], score="add(s, x0[k])", lse=True)]
"""Heads in groups with the log-sum-exp, tensors that are trained and queries that see nothing, and no mask."""


def rings(one: Case, mesh: Mesh) -> list[Option]:
    return [o for o in options(one.op, one.graph, mesh) if o.inner]


@parametrize_or_slow("mesh,step", [("x=2", 1), ("x=4", 1), ("x=2,y=2", 3)], [("x=2,y=2", 1)])
def test_attention_in_a_ring_is_that_of_one_device(mesh: str, step: int) -> None:
    place = Mesh.parse(mesh)
    found = [(one, picked) for one in CASES + FLEXIBLE for picked in rings(one, place)]
    assert len(found) >= len(CASES + FLEXIBLE) * (1 if len(place.axes) == 1 else 5)
    assert [message for one, picked in found[::step] for message in check(one, picked, place)] == []


def test_a_ring_composes_with_batch_and_heads_on_other_axes() -> None:
    layouts = {f"{o.inputs[0]}, {o.inputs[1]}" for o in rings(CAUSAL, Mesh.parse("x=2,y=2"))}
    assert layouts >= {"S(2) S(2), S(2) S(2)", "S(2) S(1), S(2) S(1)", "S(0) S(2), S(0) S(2)", "S(2) B, S(2) B"}
    assert layouts >= {"S(2) S(2), B B", "S(2) S(1), B S(1)", "S(0) S(2), S(0) B", "S(2) B, B B"}


def test_queries_do_not_go_one_way_on_one_axis_and_another_on_the_next() -> None:
    for one in (CAUSAL, FLEXIBLE[0]):
        both = [o for o in options(one.op, one.graph, Mesh.parse("x=2,y=2")) if str(o.inputs[0]) == "S(2) S(2)"]
        assert sorted((str(o.inputs[1]), bool(o.inner)) for o in both) == [
            ("B B", False), ("B B", True), ("S(2) S(2)", True)]


@pytest.mark.parametrize("one", [
    case(SDPA, f(3, 4, 7, 4), f(3, 4, 7, 4), f(3, 4, 7, 4)),
    case(SDPA, f(3, 4, 6, 4), f(3, 4, 6, 4), f(3, 4, 6, 4), None, 0.0, True),
    case(SDPA, f(3, 4, 8, 4), f(3, 4, 4, 4), f(3, 4, 4, 4), None, 0.0, True),
    case(SDPA, f(4, 8, 4), f(4, 8, 4), f(4, 8, 4))], ids=["odd", "halves", "lengths", "dims"])
def test_what_cannot_go_round_is_offered_no_ring(one: Case) -> None:
    assert rings(one, Mesh.parse("x=2")) == []


@pytest.mark.parametrize("one", [FULL, CAUSAL, FLEXIBLE[0]], ids=["full", "causal", "flexible"])
@pytest.mark.parametrize("mesh", ["x=2", "x=4", "x=2,y=2"])
def test_a_ring_sends_what_is_priced(mesh: str, one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[tuple[str, tuple[int, ...], int]] = []
    exchange, shift = _Threads.exchange, _Threads.shift

    def exchanging(threads: _Threads, at: tuple[int, ...], place: Mesh) -> Exchange:
        def record(rows: Tensor, sent: Any, received: Any, axes: tuple[int, ...], nbytes: int) -> Tensor:
            if not any(at):
                issued.append((EXCHANGE, axes, nbytes))
            return exchange(threads, at, place)(rows, sent, received, axes, nbytes)
        return record

    def shifting(threads: _Threads, at: tuple[int, ...], place: Mesh) -> Shift:
        def record(value: Tensor, axes: tuple[int, ...], number: int) -> Any:
            if not any(at):
                issued.append((SHIFT, axes, value.nbytes))
            return shift(threads, at, place)(value, axes, number)
        return record

    monkeypatch.setattr(_Threads, "exchange", exchanging)
    monkeypatch.setattr(_Threads, "shift", shifting)
    place = Mesh.parse(mesh)
    for picked in rings(one, place):
        issued.clear()
        assert check(one, picked, place) == ()
        priced = inner_collectives(one.op, one.graph, picked.inputs, picked.inner, place, (0,) * len(place.axes))
        assert issued == [(kind, axes, nbytes) for _, kind, axes, nbytes in priced] != []


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_rank_waits_for_what_takes_longer_than_a_block(way: str, ranks: int) -> None:
    shifts = sum(what == "start" for what, _ in ring_turns(way, ranks))
    assert shifts == (ranks - 1 if way == "forward" else 2 * ranks - 1)
    assert sorted(k for what, k in ring_turns(way, ranks) if what == "wait") == list(range(shifts))
    assert exposed_seconds(way, ranks, 0.0, [1.0] * shifts) == shifts
    assert exposed_seconds(way, ranks, 10.0, [1.0] * shifts) == (way == "backward")
    if way == "forward":
        assert exposed_seconds(way, ranks, 1.0, [3.0] * shifts) == 2.0 * shifts


def test_a_causal_ring_multiplies_half_on_every_rank() -> None:
    """Of 4 ranks each does an eighth of the products of all queries with all keys; a part of the queries a quarter."""
    def flops(inner: bool, keys: int) -> float:
        shapes = ((3, 4, 4, 4), (3, 2, keys, 4), (3, 2, keys, 4))
        forward, _ = work(CAUSAL.op, CAUSAL.graph, shapes, ((3, 4, 4, 4),), frozenset(), inner)
        return sum(kernel.flops for kernel in forward)

    every = 4.0 * 3 * 4 * 16 * 16 * 4
    assert flops(True, keys=4) == flops(True, keys=16) == every / 8 and flops(False, keys=16) == every / 4


def test_halves_of_a_mask_are_priced_by_the_busiest_rank_that_has_two() -> None:
    """Of causal blocks all ranks have the mean; of a mask whose first half sees nothing, each has a tail that does."""
    one = case(FLEX, f(1, 1, 16, 4), f(1, 1, 16, 4), f(1, 1, 16, 4), [], mask="ge(q, k)")
    shapes = ((1, 1, 4, 4), (1, 1, 16, 4), (1, 1, 16, 4))

    def flops(shares: tuple[float, ...], inner: bool) -> float:
        op = replace(one.op, args=(*one.op.args, (SEEN_SHARES, shares)))
        forward, _ = work(op, one.graph, shapes, ((1, 1, 4, 4),), frozenset(), inner)
        return sum(kernel.flops for kernel in forward) / (4.0 * 4 * 16 * 4)

    causal, late = tuple((n + 1) / 8 for n in range(8)), (0.0,) * 4 + (1.0,) * 4
    assert flops(causal, inner=True) == pytest.approx(9 / 16) and flops(causal, inner=False) == 15 / 16
    assert flops(late, inner=True) == 0.5 and flops(late, inner=False) == 1.0


def held(one: Case, picked: Option, ranks: int, place: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(measured, planned) bytes of a rank: the most of forward, kept between, the most of backward."""
    def exchange(rows: Tensor, sent: Any, received: Any, axes: tuple[int, ...], nbytes: int) -> Tensor:
        return rows.new_zeros(sum(received), *rows.shape[1:])

    def shift(value: Tensor, axes: tuple[int, ...], number: int) -> Any:
        got = value.clone()
        return lambda: got

    site = Site(one.op, one.inputs, one.outputs, picked, Mesh.parse(f"x={ranks}"), (place,),
                lambda value, kind, axes: value, exchange=exchange, shift=shift)
    fn, args, kwargs = lower(site, one.fn, one.args, one.kwargs)
    pieces = tuple(value.chunk(ranks, 2)[place].clone() if Split(2) in layout.states else value.clone()
                   for value, layout in zip(one.values, picked.inputs, strict=True))
    reads = tuple(Value(k, tuple(t.shape), contiguous(tuple(t.shape)), t.element_size()) for k, t in enumerate(pieces))
    made = footprint_of(LocalOp(one.op, reads, (reads[0].shape,), (reads[0].itemsize,), (0, 1, 2), on_cpu=True,
                                sends=True))
    result = float(pieces[0].nbytes)
    kept = made.beside + result * len(made.keeps)
    planned = made.before, kept, kept + result + sum(x.nbytes for x in reads) + made.back
    return measured(replace(one, fn=fn, args=args, kwargs=kwargs, values=pieces), (0, 1, 2)), planned


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 8), (torch.bfloat16, 2)])
def test_a_rank_holds_what_is_planned_and_its_share(causal: bool, dtype: torch.dtype, heads: int) -> None:
    """Backward of four ranks is planned exactly, of a causal ring within the keys and values of a block."""
    def made(length: int) -> Case:
        q, k, v = (torch.randn(1, n, length, 32).to(dtype) for n in (8, heads, heads))
        return case(SDPA, q, k, v, None, 0.0, causal, enable_gqa=heads < 8)

    peaks = []
    for ranks in (4, 8):
        one = made(1024)
        picked = rings(one, Mesh.parse(f"x={ranks}"))[0]
        found, planned = held(one, picked, ranks, ranks - 1)
        block = 2 * one.values[1].nbytes // ranks
        more = [plan - real for plan, real in zip(planned, found, strict=True)]
        assert abs(more[1]) <= NUMBER and -NUMBER <= more[0] <= block and -NUMBER <= more[2] <= block * causal
        peaks.append(found)
    assert all(small == pytest.approx(large / 2, rel=0.01) for large, small in zip(*peaks, strict=True))


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 8), (torch.bfloat16, 2)])
def test_a_rank_that_trades_queries_beside_all_keys_holds_what_is_planned(dtype: torch.dtype, heads: int) -> None:
    """Backward is planned for the first rank, which has the largest block."""
    q, k, v = (torch.randn(1, n, 512, 32).to(dtype) for n in (8, heads, heads))
    one = case(SDPA, q, k, v, None, 0.0, True, enable_gqa=heads < 8)
    picked = next(o for o in rings(one, Mesh.parse("x=4")) if str(o.inputs[1]) == "B")
    for place in (0, 3):
        found, planned = held(one, picked, 4, place)
        assert planned[:2] == pytest.approx(found[:2], abs=2 * NUMBER) and found[2] <= planned[2] + NUMBER
        assert place or planned[2] == pytest.approx(found[2], abs=2 * NUMBER)


@parametrize_or_slow("mask,dtype,heads", [("ge(q, k)", torch.bfloat16, 2)],
                     [("ge(q, k)", torch.float32, 8), ("", torch.float32, 8), ("", torch.bfloat16, 2)])
def test_flexible_attention_of_a_split_sequence_holds_at_most_what_is_planned(mask: str, dtype: torch.dtype, heads: int
                                                                              ) -> None:
    """What is kept exactly; backward, whose matrices of scores are those of a block that sees all, not much less."""
    q, k, v = (torch.randn(1, n, 512, 32).to(dtype) for n in (8, heads, heads))
    one = case(FLEX, q, k, v, [], mask=mask)
    for picked in rings(one, Mesh.parse("x=4")):
        (before, kept, back), planned = held(one, picked, 4, 0)
        assert planned[1] == pytest.approx(kept, abs=2 * NUMBER)
        assert before <= planned[0] <= 1.2 * before and 0.99 * back <= planned[2] <= 1.4 * back
