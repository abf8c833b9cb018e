"""Sends tokens to the ranks that have their experts, and brings the results back.

Tokens and experts are split over the same mesh axes. The ranks of a group over these have all experts. A rank has a row
per token and chosen expert. It sorts them by expert, and so by the rank that has it:

    forward     how many rows go to each expert; the rows; what became of them, back
    backward    q and the shares of the rows; gradients of rows and shares, back

How many rows go where is known only when the step runs: these are uneven all-to-alls. All rows that a rank sends
are those of its own tokens, and as many come back, so the bytes of either are known before. What differs is how many
rows a rank receives, which is its load: these it multiplies. Formulas are those of `experts`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl.core.layout import extents
from autoddl.operators.kernels.experts import (
    ExpertPart,
    Optional,
    added,
    multiplied,
    row_gradients,
)
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.site import Site

__all__ = ["dispatched_experts"]


@dataclass(frozen=True, slots=True)
class _Route:
    """How many rows this rank sends to each member of the group, and receives from each."""

    site: Site
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def out(self, rows: Tensor) -> Tensor:
        """Rows of this rank's tokens, as the ranks of their experts get them."""
        return self.site.exchanged(rows, self.sent, self.received, outward=True)

    def back(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts, as the ranks of their tokens get them."""
        return self.site.exchanged(rows, self.received, self.sent, outward=False)


def dispatched_experts(site: Site, part: ExpertPart, x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor,
                       down: Tensor, up_bias: Optional = None, down_bias: Optional = None) -> Tensor:
    """Returns the sum over the chosen experts for the tokens here; shapes are those of `routed_experts`."""
    if is_traced(x):
        return x.new_empty(x.shape[0], down.shape[2 if part.transposed else 1])
    found: Tensor = _Dispatched.apply(x, chosen, shares, up, down, up_bias, down_bias, part, site)  # type: ignore[no-untyped-call]
    return found


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor, up_bias: Optional,
                down_bias: Optional, part: ExpertPart, site: Site) -> Tensor:
        flat, order = chosen.reshape(-1).sort(stable=True)
        token, weights = order // chosen.shape[1], (up, down, up_bias, down_bias)
        route, expert = _counted(flat, site)
        expert, place = expert.sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(down.shape[0], device=expert.device), right=True)
        rows = route.out(x[token].to(up.dtype))[place]
        u, y = multiplied(rows, expert, ends, weights, part)
        ctx.save_for_backward(x, chosen, shares, *weights, u, rows, order, place, expert, ends)
        ctx.part, ctx.route = part, route
        y = route.back(_unsorted(y, place))
        return added(y * shares.reshape(-1)[order].unsqueeze(1), token, x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, chosen, shares, up, down, up_bias, down_bias, u, rows, order, place, expert, ends = ctx.saved_tensors
        token, route = order // chosen.shape[1], ctx.route
        found = row_gradients(u, route.out(upstream[token].to(down.dtype))[place],
                          route.out(shares.reshape(-1)[order])[place], lambda: expert, lambda: rows, ends,
                          (up, down, up_bias, down_bias), ctx.part, ctx.needs_input_grad)
        of_rows = route.back(_unsorted(found.rows, place))
        of_shares = shares.new_zeros(shares.numel())
        of_shares[order] = route.back(_unsorted(found.shares.to(shares.dtype), place))
        return added(of_rows, token, x), None, of_shares.view_as(shares), *found.weights, None, None


def _counted(chosen: Tensor, site: Site) -> tuple[_Route, Tensor]:
    """The route of rows whose sorted experts are `chosen`, and the expert, from the first here, of those received."""
    mesh, axes, down = site.mesh, site.option.inner, site.inputs[4]
    members = mesh.members(axes, site.coordinate)
    sizes = [extents(down.shape, site.option.inputs[4], mesh, member)[0][1] for member in members]
    every = torch.searchsorted(chosen, torch.arange(down.shape[0], device=chosen.device), right=True)
    counts = every.diff(prepend=every.new_zeros(1))
    here = sizes[members.index(site.coordinate)]
    received = site.exchanged(counts, tuple(sizes), (here,) * len(members), outward=True).view(len(members), here)
    sent = tuple(int(part.sum()) for part in counts.cpu().split(sizes))
    expert = torch.arange(here, device=chosen.device).repeat(len(members)).repeat_interleave(received.reshape(-1))
    return _Route(site, sent, tuple(received.sum(1).tolist())), expert


def _unsorted(rows: Tensor, place: Tensor) -> Tensor:
    """The rows in the order in which they came: row i goes to place[i]."""
    return torch.empty_like(rows).index_copy_(0, place, rows)
