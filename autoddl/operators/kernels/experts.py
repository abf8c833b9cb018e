"""Runs a mixture of experts on one rank: the rows that its experts were chosen for, sorted by expert.

Token t has chosen the experts e = chosen[t, j] with the shares w = shares[t, j]. With g a function of single elements,

    u = x[t] U_e + c_e      a = g(u)      y[t] = sum_j w (a D_e + d_e)                 a row per pair (t, j)

Rows are sorted by expert, so that each expert is one product of the rows in front of its end:

    order     the pairs by expert, those of other ranks' experts left out          ends    the end of each expert's rows

Backward keeps u alone of what is between. With q = y'[t] and z = q D_e^T, the gradients are

    w' = z . a + q . d_e      a' = w z      D_e' = sum a^T w q      u' = g'(u) a'      U_e' = sum x^T u'
    x' = u' U_e^T

`ExpertPart` says what is here of the experts, and of each one's inner width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl.operators.kernels.gates import apply_gate
from autoddl.operators.kernels.grouped import is_traced, outer_of_groups, product_of_groups, sums_of_groups
from autoddl.operators.kernels.reducing import accumulator

__all__ = [
    "ExpertGradients",
    "ExpertPart",
    "Optional",
    "Weights",
    "added",
    "is_traced",
    "multiplied",
    "routed_experts",
    "row_gradients",
]

Optional = Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Says what a rank has of a layer of experts, and how its weights lie."""

    gate: str
    """The function g, in the words of `gate_expressions`."""
    halves: int = 2
    """The number of inputs of g."""
    paired: bool = False
    """Whether the two inputs of g lie side by side in u, and not all first ones before all second ones."""
    transposed: bool = False
    """Whether the weights are (experts, in, out), and not (experts, out, in)."""
    first: int = 0
    """The first expert here."""
    every: bool = True
    """Whether all experts are here."""
    inner: tuple[int, int] | None = None
    """(offset, size) of the inner width here, where U holds all of it; None: U has the same part as D."""


def routed_experts(part: ExpertPart, x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor,
                   up_bias: Optional = None, down_bias: Optional = None) -> Tensor:
    """Returns this part's sum over the chosen experts.

        x          [tokens, in]
        chosen     [tokens, choices]: numbers of experts
        shares     [tokens, choices]
        up         [experts, inner or 2 inner, in]
        down       [experts, out, inner]
        biases     [experts, inner or 2 inner], [experts, out], or None
        result     [tokens, out], in the dtype of x
    """
    if is_traced(x):
        return x.new_empty(x.shape[0], down.shape[2 if part.transposed else 1])
    found: Tensor = _Experts.apply(x, chosen, shares, up, down, up_bias, down_bias, part)  # type: ignore[no-untyped-call]
    return found


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor, up_bias: Optional,
                down_bias: Optional, part: ExpertPart) -> Tensor:
        order, expert, ends = _sorted(chosen, down.shape[0], part)
        token, weights = order // chosen.shape[1], (up, down, up_bias, down_bias)
        u, y = multiplied(x[token].to(up.dtype), expert, ends, weights, part)
        ctx.save_for_backward(x, chosen, shares, *weights, u, order, ends)
        ctx.part = part
        y = y * shares.reshape(-1)[order].unsqueeze(1)
        return added(y, token, x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, chosen, shares, up, down, up_bias, down_bias, u, order, ends = ctx.saved_tensors
        part, token = ctx.part, order // chosen.shape[1]
        found = row_gradients(u, upstream[token].to(down.dtype), shares.reshape(-1)[order],
                          lambda: chosen.reshape(-1)[order] - part.first, lambda: x[token].to(up.dtype), ends,
                          (up, down, up_bias, down_bias), part, ctx.needs_input_grad)
        of_shares = shares.new_zeros(shares.numel())
        of_shares[order] = found.shares.to(shares.dtype)
        return added(found.rows, token, x), None, of_shares.view_as(shares), *found.weights, None


Weights = tuple[Tensor, Tensor, Optional, Optional]
"""U, D and their biases."""


@dataclass(frozen=True, slots=True)
class ExpertGradients:
    """The gradients of the sorted rows, of the share of each, and of U, D and their biases."""

    rows: Tensor
    shares: Tensor
    weights: tuple[Optional, ...]


def multiplied(rows: Tensor, expert: Tensor, ends: Tensor, weights: Weights, part: ExpertPart
               ) -> tuple[Tensor, Tensor]:
    """(u, y) of rows that are sorted by expert; `expert` is that of each row, counted from the first here."""
    up, down, up_bias, down_bias = weights
    u = _upper(rows, up, up_bias, expert, ends, part)
    del rows
    y = product_of_groups(apply_gate(part.gate, *_halves(u, part)), _by_rows(down, part), ends)
    if down_bias is not None:
        y += down_bias[expert]
    return u, y


def row_gradients(u: Tensor, q: Tensor, shares: Tensor, expert: Callable[[], Tensor], rows: Callable[[], Tensor],
              ends: Tensor, weights: Weights, part: ExpertPart, needs: Sequence[bool]) -> ExpertGradients:
    """The gradients from q, the upstream of each row before its share; `needs` is in the order of the op's inputs."""
    up, down, up_bias, down_bias = weights
    share = shares.unsqueeze(1)
    z = product_of_groups(q, _by_rows(down, part).transpose(1, 2), ends)
    with torch.enable_grad():
        leaves = [half.detach().requires_grad_() for half in _halves(u, part)]
        a = apply_gate(part.gate, *leaves)
    of_share = torch.linalg.vecdot(z, a.detach())
    if down_bias is not None:
        of_share = of_share + (q * down_bias[expert()]).sum(1)
    q = torch.mul(q, share, out=torch.empty_like(q, dtype=down.dtype))
    of_down = _weight_gradient(a.detach(), q, ends, part) if needs[4] else None
    of_down_bias = None if down_bias is None else sums_of_groups(q, ends)
    del q
    z = z.mul_(share).to(a.dtype)
    of_u = _together(torch.autograd.grad(a, leaves, z), part)
    del a, z
    of_up = _of_upper(rows(), of_u, up, ends, part) if needs[3] else None
    of_up_bias = None if up_bias is None else _spread(sums_of_groups(of_u, ends), up_bias, 1, part)
    of_rows = product_of_groups(of_u, _used(_by_rows(up, part), part, 2).transpose(1, 2), ends)
    return ExpertGradients(of_rows, of_share, (of_up, of_down, of_up_bias, of_down_bias))


def _upper(rows: Tensor, up: Tensor, up_bias: Optional, expert: Tensor, ends: Tensor, part: ExpertPart) -> Tensor:
    """The rows of the upper product."""
    u = product_of_groups(rows, _used(_by_rows(up, part), part, 2), ends)
    if up_bias is not None:
        u += _used(up_bias, part, 1)[expert]
    return u


def _of_upper(rows: Tensor, of_u: Tensor, up: Tensor, ends: Tensor, part: ExpertPart) -> Tensor:
    """The gradient of U, from the tokens' rows and the gradient of u."""
    return _spread(_weight_gradient(rows, of_u, ends, part), up, 2 if part.transposed else 1, part)


def _sorted(chosen: Tensor, count: int, part: ExpertPart) -> tuple[Tensor, Tensor, Tensor]:
    """(order, the expert of each row, ends) for the `count` experts here, which are counted from the first."""
    local = chosen.reshape(-1) - part.first
    if part.every:
        expert, order = local.sort(stable=True)
    else:
        here = ((local >= 0) & (local < count)).nonzero().squeeze(1)
        expert, by_expert = local[here].sort(stable=True)
        order = here[by_expert]
    return order, expert, torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True)


def _by_rows(weight: Tensor, part: ExpertPart) -> Tensor:
    """The weight as (experts, in, out)."""
    return weight if part.transposed else weight.transpose(1, 2)


def _used(up: Tensor, part: ExpertPart, dim: int) -> Tensor:
    """Returns what is used here of U or its bias: all of it, or a copy of a piece of each half along `dim`."""
    if part.inner is None:
        return up
    offset, size = part.inner
    return torch.cat([half.narrow(dim, offset, size) for half in up.chunk(2, dim)], dim)


def _spread(gradient: Tensor, up: Tensor, dim: int, part: ExpertPart) -> Tensor:
    """The gradient of U or its bias, from that of what is used: zero elsewhere."""
    if part.inner is None:
        return gradient
    offset, size = part.inner
    found = torch.zeros_like(up)
    for half, piece in zip(found.chunk(2, dim), gradient.chunk(2, dim), strict=True):
        half.narrow(dim, offset, size).copy_(piece)
    return found


def _halves(u: Tensor, part: ExpertPart) -> tuple[Tensor, ...]:
    """The inputs of the gate, as views of u."""
    if part.halves == 1:
        return (u,)
    return (u[:, ::2], u[:, 1::2]) if part.paired else u.chunk(2, 1)


def _together(halves: tuple[Tensor, ...], part: ExpertPart) -> Tensor:
    """The gradient of u from those of its halves."""
    if part.halves == 1:
        return halves[0]
    return torch.stack(halves, 2).flatten(1) if part.paired else torch.cat(halves, 1)


def added(rows: Tensor, token: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of each token, in the dtype of `like`."""
    out = rows.new_zeros(like.shape[0], rows.shape[1], dtype=accumulator(rows.dtype))
    return out.index_add_(0, token, rows.to(out.dtype)).to(like.dtype)


def _weight_gradient(rows: Tensor, gradient: Tensor, ends: Tensor, part: ExpertPart) -> Tensor:
    """The sum of rows^T gradient of each expert, as its weight lies."""
    return outer_of_groups(*((rows, gradient) if part.transposed else (gradient, rows)), ends)
