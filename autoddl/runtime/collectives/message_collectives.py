"""Runs collectives that are made of messages, on real tensors, over point-to-point transfers.

A message starts when its receiver is ready, and the notice of that waits behind bulk data. So every receive is posted
before the first send. Each sum is made in the order of `schedule.message_programs`, so its bits are the same in every
run. A sum that is made once and copied has the same bits on every rank.
"""

from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoddl.cost_models.algorithms import message_pieces
from autoddl.schedule.message_programs import MessageProgram, Receive, message_program, stage_peers

__all__ = ["TAGS", "exchange", "message_device", "swap"]

TAGS = 2**16
"""Messages of one collective between two ranks are told apart by that many numbers."""

Parts = list[Sequence[Tensor]]


def message_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where messages of tensors on `device` lie: gloo sends them from the host's memory alone, and ends a process that
    gives it another."""
    return torch.device("cpu") if group is None or dist.get_backend(group) == "gloo" else device


@torch.no_grad()
def exchange(kind: str, got: Tensor, given: Tensor, ways: tuple[int, ...], group: dist.ProcessGroup, tag: int = 0,
             how: str = "sum", timeout: timedelta | None = None) -> None:
    """Runs one collective among the prod(ways) members of `group`, of whom those inside ways[0] are neighbours.

    Tensors are flat and contiguous, as for torch.distributed's `*_single`: an all-reduce has `got` = `given`, and in
    others the larger one is n equal chunks. The reduction `how` is "sum" or "max". This call owns the `TAGS` numbers
    from `tag` in the group until it ends. A message takes at most `timeout`, by default the group's. Raises
    RuntimeError, from the backend, when a peer is gone.
    """
    if kind == "all-to-all" and len(ways) > 1:
        return _in_stages(got, given, ways, group, tag, (timeout,) if timeout else ())
    n, rank = prod(ways), group.rank()
    whole = got if kind == "all-gather" else given
    pieces = message_pieces(n, whole.numel() * whole.element_size())
    source = _cut(whole, n, pieces)
    target = _cut(got, n, pieces) if kind == "all-to-all" else source
    if kind in ("all-gather", "all-to-all"):
        got.view(n, -1)[rank].copy_(given if kind == "all-gather" else given.view(n, -1)[rank])
    mine = _run(message_program(kind, ways, rank, pieces), source, target, group, tag, how,
                (timeout,) if timeout else ())[rank]
    if kind == "reduce-scatter":
        torch.cat(list(mine), out=got)
    elif kind == "all-reduce":
        for place, total in zip(target[rank], mine, strict=True):
            place.copy_(total)


def _in_stages(got: Tensor, given: Tensor, ways: tuple[int, ...], group: dist.ProcessGroup, tag: int,
               limit: tuple[timedelta, ...]) -> None:
    """An all-to-all in every level in turn, inside first.

    A dim of the buffer counts where its chunks go in a level; after the stage of that level, where they come from."""
    rank, held = group.rank(), given.view(*reversed(ways), -1)
    for level in range(len(ways)):
        dim, peers = len(ways) - 1 - level, stage_peers(ways, rank, level)
        out = held.movedim(dim, 0).contiguous()
        into = torch.empty_like(out)
        own = peers.index(rank)
        into[own].copy_(out[own])
        _trade(group, tag + level, limit, peers, own, out, into)
        held = into.movedim(0, dim)
    got.copy_(held.reshape(-1))


def swap(group: dist.ProcessGroup, tag: int, timeout: timedelta | None, given: Sequence[Tensor],
         expected: Sequence[int]) -> list[Tensor]:
    """Gives every member of `group` its flat tensor, and returns what came from each, of `expected` elements.

    Nothing is sent for an empty tensor. This call owns the one number `tag` in the group. Raises RuntimeError, from the
    backend, when a peer is gone.
    """
    rank, n, device = group.rank(), len(given), given[0].device
    given = [one.to(message_device(device, group)) for one in given]
    got = [given[r] if r == rank else given[r].new_empty(expected[r]) for r in range(n)]
    _trade(group, tag, (timeout,) if timeout else (), range(n), rank, given, got)
    return [one.to(device) for one in got]


def _trade(group: dist.ProcessGroup, tag: int, limit: tuple[timedelta, ...], peers: Sequence[int], own: int,
           given: Sequence[Tensor] | Tensor, got: Sequence[Tensor] | Tensor) -> None:
    """Sends given[i] to peers[i], for all but `own`, and receives got[i] from it; nothing for an empty tensor."""
    others = [(own + i) % len(peers) for i in range(1, len(peers))]
    works = [group.recv([got[i]], peers[i], tag) for i in others if got[i].numel()]
    works += [group.send([given[i].contiguous()], peers[i], tag) for i in others if given[i].numel()]
    for work in works:
        work.wait(*limit)


def _cut(buffer: Tensor, n: int, pieces: int) -> Parts:
    """The pieces [chunk][piece] of a buffer, as equal as they can be."""
    return [chunk.tensor_split(pieces) for chunk in buffer.tensor_split(n)]


def _run(messages: MessageProgram, source: Parts, target: Parts, group: dist.ProcessGroup, tag: int, how: str,
         limit: tuple[timedelta, ...]) -> list[list[Tensor]]:
    """Sends and receives; returns this rank's pieces at the end. Sums are not in `target`, other receives are."""
    holding = [list(row) for row in source]
    posted = [_post(one, source, target, group, tag) for one in messages.receives]
    sent: list[Any] = []
    upcoming = 0
    for k in range(len(posted) + 1):
        while upcoming < len(messages.sends) and messages.sends[upcoming].after <= k:
            one = messages.sends[upcoming]
            part = holding[one.chunk][one.piece]
            if part.numel():
                sent.append(group.send([part], one.to, tag + one.number))
            upcoming += 1
        if k < len(posted):
            arrived = _wait(messages.receives[k], *posted[k], holding, how, limit)
            if source is target:
                holding[messages.receives[k].chunk][messages.receives[k].piece] = arrived
    for work in sent:
        work.wait(*limit)
    return holding


def _post(one: Receive, source: Parts, target: Parts, group: dist.ProcessGroup, tag: int) -> tuple[Any, Tensor]:
    """Posts a receive; returns its work, None for an empty piece, and the buffer where it arrives."""
    into = torch.empty_like(source[one.chunk][one.piece]) if one.add else target[one.chunk][one.piece]
    return (group.recv([into], one.of, tag + one.number) if into.numel() else None), into


def _wait(one: Receive, work: Any, into: Tensor, holding: list[list[Tensor]], how: str,
          limit: tuple[timedelta, ...]) -> Tensor:
    """Waits for a receive; returns the piece, added to this rank's own if it is to be."""
    if work is not None:
        work.wait(*limit)
    if one.add:
        own = holding[one.chunk][one.piece]
        torch.add(own, into, out=into) if how == "sum" else torch.maximum(own, into, out=into)
    return into
