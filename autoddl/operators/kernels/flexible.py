"""Runs FlexAttention on one rank: attention whose mask and scores are functions of single elements (`flexible`).

    s = score(scale q k', b, h, q, k)  where mask(b, h, q, k), else -inf      l = log sum exp(s)      o = exp(s - l) v

A query that sees no key has o = 0 and l = -inf. Rows of queries come in blocks. A block keeps no scores: backward
computes them again. It computes with the keys from the first to the last that one of its queries sees.

    p = exp(s - l)      gs = p (go v' - sum(go * o) + gl)      gv = p' go      the other gradients from gs
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl.core.errors import InputError
from autoddl.operators.flexible import SCORES, elementwise_text, parsed_text
from autoddl.operators.kernels.attention_blocks import grouped, shares_of, sum_dtype
from autoddl.operators.kernels.grouped import is_traced

__all__ = ["Elements", "Grid", "Places", "attended", "flexible_attention", "gradients", "value_of_text"]

Places = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""(the first batch, head and query, and the first index of each dim of the tensors that are read) on this rank."""


@dataclass(frozen=True, slots=True)
class Elements:
    """The functions of a call, and where the pieces lie on this rank."""

    score: str
    mask: str
    scale: float
    places: Places
    queries: tuple[int, ...] = ()
    """The first queries of parts of equal length, where there are several."""


def flexible_attention(part: Elements, q: Tensor, k: Tensor, v: Tensor, read: Sequence[Tensor]
                       ) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of queries [batch, heads, n, d] over keys [batch, fewer heads, m, d]."""
    if is_traced(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=sum_dtype(q))
    found: tuple[Tensor, Tensor] = _Flexible.apply(part, q, k, v, *read)  # type: ignore[no-untyped-call]
    return found


def value_of_text(text: str, known: dict[str, Any], places: Sequence[Sequence[int]], floating: torch.dtype) -> Any:
    """The value of a text, of which `known` are the names; `places` are the first indices of the tensors."""
    return _value(parsed_text(text), dict(known), places, floating)


def _value(node: ast.expr, known: dict[str, Any], places: Sequence[Sequence[int]], floating: torch.dtype) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return float("inf")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, known, places, floating)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.Subscript(value=ast.Name(id=name), slice=at) if name in known:
            parts = at.elts if isinstance(at, ast.Tuple) else [at]
            first = places[int(name[1:])] if places else (0,) * len(parts)
            indices = tuple(_value(one, known, places, floating) - start
                            for one, start in zip(parts, first, strict=True))
            return known[name][indices]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if elementwise_text(name):
            text = ast.unparse(node)
            if text not in known:
                values = [_value(x, known, places, floating) for x in args]
                named = {str(x.arg): _value(x.value, known, places, floating) for x in keywords}
                known[text] = _called(name, values, named, floating)
            return known[text]
    raise InputError(f"{ast.unparse(node)!r} is no function of s, b, h, q and k; write one like ge(q, k)")


def _called(name: str, values: list[Any], named: dict[str, Any], floating: torch.dtype) -> Any:
    dtypes = {"as_float": floating, "as_int": torch.int64, "as_bool": torch.bool}
    if name in dtypes:
        return values[0].to(dtypes[name])
    call: Callable[..., Any] = getattr(torch.ops.aten, name)
    return call(*values, **named)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The indices of scores of a rank, in the shape of grouped scores.

        part       the functions, and where the pieces lie
        batch      size of the batch here
        heads      heads of keys here, and heads of queries for each
        run        queries that lie together
        queries    the queries here, by number
        keys       the keys here, by number
    """

    part: Elements
    batch: int
    heads: tuple[int, int]
    run: int
    queries: Tensor
    keys: Tensor

    @classmethod
    def of(cls, part: Elements, q: Tensor, k: Tensor, keys: Sequence[int] = (0,)) -> "Grid":
        """The grid of queries and keys, which begin at these `keys` in parts of equal length."""
        firsts = part.queries or part.places[0][2:]
        return cls(part, q.shape[0], (k.shape[1], q.shape[1] // k.shape[1]), max(1, q.shape[2] // len(firsts)),
                   _numbers(firsts, q), _numbers(keys, k))

    def names(self, read: Sequence[Tensor], rows: slice, columns: slice) -> dict[str, Any]:
        """The indices of some queries and keys, and the tensors that are read."""
        b, h = (torch.arange(n, device=self.keys.device) + first for n, first in zip(
            (self.batch, self.heads[0] * self.heads[1]), self.part.places[0], strict=False))
        return {"b": b.view(-1, 1, 1, 1, 1), "h": h.view(1, *self.heads, 1, 1), "q": self.queries[rows].view(-1, 1),
                "k": self.keys[columns], **{f"x{i}": x for i, x in enumerate(read)}}

    def mask(self, read: Sequence[Tensor], rows: slice, columns: slice) -> Tensor | None:
        if not self.part.mask:
            return None
        return torch.as_tensor(value_of_text(self.part.mask, self.names(read, rows, columns), self.part.places[1],
                                             torch.float64), device=self.keys.device)

    def blocks(self, read: Sequence[Tensor]) -> Iterator[tuple[slice, slice]]:
        """Rows of queries that see a key, and the keys from the first to the last that one of them sees."""
        count, keys = len(self.queries), len(self.keys)
        height = min(self.run, max(1, SCORES // max(1, self.batch * self.heads[0] * self.heads[1] * keys)))
        for start in (first + more for first in range(0, count, self.run) for more in range(0, self.run, height)):
            end = min(start + height, start - start % self.run + self.run)
            rows, columns = slice(start, end), slice(0, keys)
            seen = self.mask(read, rows, columns)
            if seen is not None:
                columns = _ends(seen, keys)
            if columns.start < columns.stop:
                yield rows, columns

    def scores(self, q: Tensor, k: Tensor, read: Sequence[Tensor], rows: slice, columns: slice) -> Tensor:
        """s above of grouped queries and keys [batch, heads of keys, 1, keys, size]."""
        part, found = self.part, (q @ k.transpose(-2, -1)) * self.part.scale
        if part.score:
            names = {**self.names(read, rows, columns), "s": found}
            found = value_of_text(part.score, names, part.places[1], found.dtype).to(found.dtype)
        seen = self.mask([x.detach() for x in read], rows, columns)
        return found if seen is None else found.masked_fill(~seen, float("-inf"))


def _ends(seen: Tensor, keys: int) -> slice:
    """The keys from the first to the last that is seen, by a mask of all `keys`, or of one for all."""
    here = seen.reshape(-1, seen.shape[-1] if seen.dim() else 1).any(0).nonzero()
    if not len(here):
        return slice(0, 0)
    return slice(int(here[0]), int(here[-1]) + 1) if seen.dim() and seen.shape[-1] == keys else slice(0, keys)


def attended(grid: Grid, q: Tensor, k: Tensor, v: Tensor, read: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of queries over the keys of a grid, in float32 at least."""
    wide, keys, values = (grouped(x, k.shape[1]) for x in (q, k, v))
    out = wide.new_zeros(*wide.shape[:-1], v.shape[-1])
    sums = wide.new_full(wide.shape[:-1], float("-inf"))
    for rows, columns in grid.blocks(read):
        scores = grid.scores(wide[..., rows, :], keys[..., columns, :], read, rows, columns)
        sums[..., rows] = scores.logsumexp(-1)
        out[..., rows, :] = shares_of(scores, sums[..., rows]) @ values[..., columns, :]
    return out.flatten(1, 2), sums.flatten(1, 2)


def gradients(grid: Grid, upstream: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
              read: Sequence[Tensor], of_read: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a grid's keys in the gradients of q, k and v, where `out` and `sums` are those of all keys.

    `upstream` is the gradient of the output, and that of its log-sum-exp if there is one. Those of what is read are
    added to `of_read`, where it has a tensor."""
    wide, keys, values, given, all_out = (grouped(x, k.shape[1]) for x in (q, k, v, upstream[0], out))
    totals, all_sums = [torch.zeros_like(x) for x in (wide, keys, values)], sums.view(wide.shape[:-1])
    trained = [i for i, total in enumerate(of_read) if total is not None]
    level = -(given * all_out).sum(-1) + sum(x.view(all_sums.shape) for x in upstream[1:])
    for rows, columns in grid.blocks(read):
        leaves = (wide[..., rows, :].detach().requires_grad_(), keys[..., columns, :].detach().requires_grad_())
        those = [x.detach().requires_grad_(i in trained) for i, x in enumerate(read)]
        with torch.enable_grad():
            scores = grid.scores(*leaves, those, rows, columns)
        shares, part = shares_of(scores.detach(), all_sums[..., rows]), given[..., rows, :]
        of_scores = shares * (part @ values[..., columns, :].transpose(-2, -1) + level[..., rows, None])
        found = torch.autograd.grad(scores, [*leaves, *(those[i] for i in trained)], of_scores, allow_unused=True)
        totals[0][..., rows, :] += found[0]
        totals[1][..., columns, :] += found[1]
        totals[2][..., columns, :] += (shares.transpose(-2, -1) @ part).sum_to_size(values[..., columns, :].shape)
        for i, gradient in zip(trained, found[2:], strict=True):
            total = of_read[i]
            if gradient is not None and total is not None:
                total += gradient
    of_q, of_k, of_v = (total.flatten(1, 2) for total in totals)
    return of_q, of_k, of_v


class _Flexible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Elements, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = attended(Grid.of(part, q, k), q, k, v, read)
        ctx.save_for_backward(q, k, v, out, sums, *read)
        ctx.part = part
        return out.to(q.dtype), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, sums, *read = ctx.saved_tensors
        of_read = [torch.zeros_like(x) if needed else None
                   for x, needed in zip(read, ctx.needs_input_grad[4:], strict=True)]
        found = gradients(Grid.of(ctx.part, q, k), upstream, q, k, v, out, sums, read, of_read)
        return None, *(x.to(q.dtype) for x in found), *of_read


def _numbers(firsts: Sequence[int], x: Tensor) -> Tensor:
    """The numbers of a sequence [.., sequence, size] in parts of equal length, which begin at `firsts`."""
    part = torch.arange(x.shape[-2] // len(firsts), device=x.device)
    return torch.cat([part + first for first in firsts])
