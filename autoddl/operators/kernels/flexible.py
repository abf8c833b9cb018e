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
from autoddl.operators.kernels.arguments import bound
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.site import Kernel, Site, TorchCall

__all__ = ["KERNELS", "Elements", "Places", "flexible_attention", "value_of_text"]

Places = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""(the first batch, head and query, and the first index of each dim of the tensors that are read) on this rank."""


@dataclass(frozen=True, slots=True)
class Elements:
    """The functions of a call, and where the pieces lie on this rank."""

    score: str
    mask: str
    scale: float
    places: Places


def flexible_attention(part: Elements, q: Tensor, k: Tensor, v: Tensor, read: Sequence[Tensor]
                       ) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of queries [batch, heads, n, d] over keys [batch, fewer heads, m, d]."""
    if is_traced(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q))
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


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[batch, heads, n, d] as [batch, heads of keys, heads of queries for each, n, d], in float32 at least."""
    found: Tensor = x.to(_wide(x)).unflatten(1, (heads, x.shape[1] // heads))
    return found


@dataclass(frozen=True, slots=True)
class _Grid:
    """The indices of all scores of a rank, in the shape of grouped scores.

        part       the functions, and where the pieces lie
        batch      size of the batch here
        heads      heads of keys here, and heads of queries for each
        queries    queries here
        keys       all keys
        device     the device of the scores
    """

    part: Elements
    batch: int
    heads: tuple[int, int]
    queries: int
    keys: int
    device: torch.device

    @classmethod
    def of(cls, part: Elements, q: Tensor, k: Tensor) -> "_Grid":
        return cls(part, q.shape[0], (k.shape[1], q.shape[1] // k.shape[1]), q.shape[2], k.shape[2], q.device)

    def names(self, read: Sequence[Tensor], rows: slice, columns: slice) -> dict[str, Any]:
        """The indices of some queries and keys, and the tensors that are read."""
        b, h, q = (torch.arange(n, device=self.device) + first for n, first in zip(
            (self.batch, self.heads[0] * self.heads[1], self.queries), self.part.places[0], strict=True))
        k = torch.arange(self.keys, device=self.device)
        return {"b": b.view(-1, 1, 1, 1, 1), "h": h.view(1, *self.heads, 1, 1), "q": q[rows].view(-1, 1),
                "k": k[columns], **{f"x{i}": x for i, x in enumerate(read)}}

    def mask(self, read: Sequence[Tensor], rows: slice, columns: slice) -> Tensor | None:
        if not self.part.mask:
            return None
        return torch.as_tensor(value_of_text(self.part.mask, self.names(read, rows, columns), self.part.places[1],
                                             torch.float64), device=self.device)

    def blocks(self, read: Sequence[Tensor]) -> Iterator[tuple[slice, slice]]:
        """Rows of queries, and the keys from the first to the last that one of them sees."""
        height = max(1, SCORES // max(1, self.batch * self.heads[0] * self.heads[1] * self.keys))
        for start in range(0, self.queries, height):
            rows, columns = slice(start, min(start + height, self.queries)), slice(0, self.keys)
            seen = self.mask(read, rows, columns)
            if seen is not None:
                columns = _ends(seen, self.keys)
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


class _Flexible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Elements, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> tuple[Tensor, Tensor]:
        grid, heads = _Grid.of(part, q, k), k.shape[1]
        wide, keys, values = _grouped(q, heads), _grouped(k, heads), _grouped(v, heads)
        out = wide.new_zeros(*wide.shape[:-1], v.shape[-1])
        sums = wide.new_full(wide.shape[:-1], float("-inf"))
        for rows, columns in grid.blocks(read):
            if columns.start == columns.stop:
                continue
            scores = grid.scores(wide[..., rows, :], keys[..., columns, :], read, rows, columns)
            sums[..., rows] = scores.logsumexp(-1)
            out[..., rows, :] = _shares(scores, sums[..., rows]) @ values[..., columns, :]
        ctx.save_for_backward(q, k, v, out, sums, *read)
        ctx.part = part
        return out.flatten(1, 2).to(q.dtype), sums.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, sums, *read = ctx.saved_tensors
        grid, heads = _Grid.of(ctx.part, q, k), k.shape[1]
        wide, keys, values, given = (_grouped(x, heads) for x in (q, k, v, upstream[0]))
        totals = [torch.zeros_like(x) for x in (wide, keys, values)]
        trained = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        of_read = {i: torch.zeros_like(read[i]) for i in trained}
        level = upstream[1].view(sums.shape) - (given * out).sum(-1)
        for rows, columns in grid.blocks(read):
            if columns.start == columns.stop:
                continue
            leaves = (wide[..., rows, :].detach().requires_grad_(), keys[..., columns, :].detach().requires_grad_())
            those = [x.detach().requires_grad_(i in trained) for i, x in enumerate(read)]
            with torch.enable_grad():
                scores = grid.scores(*leaves, those, rows, columns)
            shares, part = _shares(scores.detach(), sums[..., rows]), given[..., rows, :]
            of_scores = shares * (part @ values[..., columns, :].transpose(-2, -1) + level[..., rows, None])
            found = torch.autograd.grad(scores, [*leaves, *(those[i] for i in trained)], of_scores, allow_unused=True)
            totals[0][..., rows, :] += found[0]
            totals[1][..., columns, :] += found[1]
            totals[2][..., columns, :] += (shares.transpose(-2, -1) @ part).sum_to_size(
                values[..., columns, :].shape)
            for i, gradient in zip(trained, found[2:], strict=True):
                if gradient is not None:
                    of_read[i] += gradient
        of_q, of_k, of_v = (total.flatten(1, 2).to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        return None, of_q, of_k, of_v, *(of_read.get(i) for i in range(len(read)))


def _shares(scores: Tensor, sums: Tensor) -> Tensor:
    """p above; 0 for a query that sees no key."""
    found = (scores - sums.unsqueeze(-1)).exp()
    return found.masked_fill(sums.unsqueeze(-1) == float("-inf"), 0.0)


def _flex_attention(site: Site, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    """The call with the places of the pieces; a tensor that is read lies where its layout says."""
    values = bound(target, args, kwargs)
    batch, head, query, _ = (first for first, _ in site.output_extents())
    read = tuple(tuple(first for first, _ in site.input_extents(k)) for k in range(3, len(site.inputs)))

    def placed_attention(**k: Any) -> Any:
        return target(**k, index=((batch, head, query), read))

    return placed_attention, (), values


KERNELS: dict[str, Kernel] = {"autoddl.flex_attention": _flex_attention}
