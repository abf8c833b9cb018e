"""Tokens that are sent to the ranks of their experts: what is sent, and what a rank holds meanwhile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from held import measured
from op_cases import EXPERTS, OF_GPT_OSS
from torch import Tensor

from autoddl.core.layout import Mesh, Split
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.kernels.site import Exchange, Site
from autoddl.operators.kernels.table import lower
from autoddl.operators.rules.nn import inner_collectives
from autoddl.operators.rules.table import Option, options
from autoddl.operators.trials.cases import Case, case
from autoddl.operators.trials.trial import _Threads, check


def sending(one: Case, mesh: str) -> list[Option]:
    return [o for o in options(one.op, one.graph, Mesh.parse(mesh)) if o.inner]


@pytest.mark.parametrize("mesh", ["x=2", "x=2,y=2"])
def test_kernels_send_what_is_priced_whatever_was_chosen(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[tuple[tuple[int, ...], int]] = []
    original = _Threads.exchange

    def recording(threads: _Threads, at: tuple[int, ...], place: Mesh) -> Exchange:
        exchange = original(threads, at, place)

        def record(rows: Tensor, sent: Any, received: Any, axes: tuple[int, ...], nbytes: int) -> Tensor:
            if not any(at):
                issued.append((axes, nbytes))
                assert nbytes in (rows.nbytes, sum(received) * rows[:1].nbytes if len(rows) else nbytes)
            return exchange(rows, sent, received, axes, nbytes)
        return record

    monkeypatch.setattr(_Threads, "exchange", recording)
    place = Mesh.parse(mesh)
    for one, picked in [(call, o) for call in EXPERTS for o in sending(call, mesh)]:
        issued.clear()
        assert check(one, picked, place) == ()
        priced = inner_collectives(one.op, one.graph, picked.inputs, picked.inner, place, (0,) * len(place.axes))
        assert issued == [(axes, nbytes) for _, _, axes, nbytes in priced] and len(issued) == 7


def test_tokens_are_sent_over_all_axes_that_split_experts() -> None:
    found = sending(EXPERTS[0], "x=2,y=2")
    assert {o.inner for o in found} == {(0,), (1,), (0, 1)}
    for one in found:
        assert {a for a, state in enumerate(one.inputs[4]) if state == Split(0)} == {*one.inner}


def alike(wide: int, inner: int, gate: str) -> Case:
    """512 tokens that each chose the same expert of either half of 8."""
    chosen = torch.arange(512).remainder(4).unsqueeze(1)
    return case("autoddl.experts", torch.randn(512, wide), torch.cat([chosen, chosen + 4], 1), torch.rand(512, 2),
                torch.randn(8, 2 * inner, wide), torch.randn(8, wide, inner), gate=gate, count=8)


@pytest.mark.parametrize(("wide", "inner", "gate", "over"), [
    (64, 48, "mul(silu(a), b)", 0), (64, 192, "mul(silu(a), b)", 0), (256, 16, "mul(silu(a), b)", 0),
    (64, 192, OF_GPT_OSS, 1)])
def test_a_rank_holds_what_is_planned_where_experts_are_chosen_equally(wide: int, inner: int, gate: str, over: int
                                                                       ) -> None:
    """Rank 0 of 2, whose peer sends what it sends itself; a long gate is planned with up to `over` rows more."""
    one = alike(wide, inner, gate)
    (picked,) = sending(one, "x=2")

    def exchange(rows: Tensor, sent: Any, received: Any, axes: tuple[int, ...], nbytes: int) -> Tensor:
        found = rows.new_empty(sum(received), *rows.shape[1:])
        return found.copy_(rows[:4].repeat(2)) if rows.dtype == torch.int64 else found.fill_(0.5)

    site = Site(one.op, one.inputs, one.outputs, picked, Mesh.parse("x=2"), (0,), lambda value, kind, axes: value,
                exchange=exchange)
    fn, args, kwargs = lower(site, one.fn, one.args, one.kwargs)
    pieces = tuple(value[:len(value) // 2].clone() for value in one.values)
    needs = (0, 2, 3, 4)
    reads = tuple(Value(k, tuple(t.shape), contiguous(tuple(t.shape)), t.element_size()) for k, t in enumerate(pieces))
    held = footprint_of(LocalOp(one.op, reads, ((256, wide),), (4,), needs, inner=True, on_cpu=True))
    result = 256.0 * wide * 4
    planned = torch.tensor((max(held.before, result + held.beside + held.during), held.beside,
               held.beside + result + sum(reads[k].nbytes for k in needs) + held.back))
    local = replace(one, fn=fn, args=args, kwargs=kwargs, values=pieces)
    more, near = planned - torch.tensor(measured(local, needs)), 0.03 * max(x.nbytes for x in pieces)
    assert more.min() > -near and more.max() < near + over * 512 * inner * 4
