"""Runs attention of some queries over some of the keys: forward with its log-sum-exp, backward with a given one.

    s = scale q k' + mask        l = log sum exp(s)        o = exp(s - l) v                          a block
    p = exp(s - l)      D = sum(go * o)      gs = p (go v' - D)       gq = scale gs k    gk = scale gs' q    gv = p' go

Backward takes o and l of all keys. A block's part of a gradient is the formula above with these (Dao 2022).

torch's own kernel runs where it knows the call. Else the products are written out, in float32 at least.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gradients", "Heads", "block_backward", "block_forward", "grouped", "shares_of", "sum_dtype"]

_CPU, _CUDA = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{which}") for which in ("_for_cpu", ""))
_CPU_BACK, _CUDA_BACK = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{which}_backward")
                         for which in ("_for_cpu", ""))
_HALF = (torch.float16, torch.bfloat16)


class Gradients(NamedTuple):
    """The gradients of a block: of its queries, keys, values, and mask where that was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """How attention is called: `scale` of the scores, and whether the mask needs a gradient."""

    scale: float
    of_mask: bool = False

    def fused(self, q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
        """Whether torch's kernel knows the call."""
        if self.of_mask or q.shape[-1] != v.shape[-1] or q.stride(-1) != 1:
            return False
        return not q.is_cuda or (mask is None and q.dtype in _HALF)


def block_forward(heads: Heads, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
                  ) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp per query) of queries [batch, heads, n, d] over keys [batch, fewer heads, m, d].

    `mask` is added to the scores. A query that sees no key has output 0 and -inf.
    """
    if not heads.fused(q, v, mask):
        return _written_forward(heads, q, k, v, mask, causal)
    if q.is_cuda:
        out, sums, *_ = _CUDA(q, k, v, 0.0, causal, scale=heads.scale)
        return out, sums
    out, sums = _CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=heads.scale)
    return out, sums if mask is None else sums.masked_fill(_blind(mask).expand(sums.shape), float("-inf"))


def block_backward(heads: Heads, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
                   mask: Tensor | None, causal: bool) -> Gradients:
    """The part of a block in the gradients, where `out` and `sums` are those of all keys."""
    if not heads.fused(q, v, mask):
        return _written_backward(heads, upstream, q, k, v, out, sums, mask, causal)
    if q.is_cuda:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        found = _CUDA_BACK(upstream, q, k, v, out, sums.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal,
                           state, state.new_empty(0), scale=heads.scale)
    else:
        found = _CPU_BACK(upstream, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=heads.scale)
    return Gradients(*found)


def _blind(mask: Tensor) -> Tensor:
    """Which queries see no key, [.., n]."""
    return (mask == float("-inf")).all(-1)


def _scores(heads: Heads, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """s above, in float32 at least, [batch, heads of k, heads of q for each, n, m]."""
    scores = torch.einsum("bgrnd,bgmd->bgrnm", grouped(q, k.shape[1]), _wide(k)) * heads.scale
    if mask is not None:
        scores = scores + _as_scores(_wide(mask), scores)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _written_forward(heads: Heads, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
                     ) -> tuple[Tensor, Tensor]:
    scores = _scores(heads, q, k, mask, causal)
    sums = scores.logsumexp(-1)
    out = torch.einsum("bgrnm,bgmd->bgrnd", shares_of(scores, sums), _wide(v))
    return out.flatten(1, 2).to(q.dtype), sums.flatten(1, 2)


def _written_backward(heads: Heads, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
                      mask: Tensor | None, causal: bool) -> Gradients:
    wide, given = grouped(q, k.shape[1]), grouped(upstream, k.shape[1])
    shares = shares_of(_scores(heads, q, k, mask, causal), sums.view(wide.shape[:-1]))
    of_v = torch.einsum("bgrnm,bgrnd->bgmd", shares, given)
    dots = (given * grouped(out, k.shape[1])).sum(-1, keepdim=True)
    of_scores = shares * (torch.einsum("bgrnd,bgmd->bgrnm", given, _wide(v)) - dots)
    of_mask = _summed_to(of_scores.flatten(1, 2), mask) if heads.of_mask and mask is not None else None
    of_q = torch.einsum("bgrnm,bgmd->bgrnd", of_scores, _wide(k)) * heads.scale
    of_k = torch.einsum("bgrnm,bgrnd->bgmd", of_scores, wide) * heads.scale
    return Gradients(of_q.flatten(1, 2), of_k, of_v, of_mask)


def shares_of(scores: Tensor, sums: Tensor) -> Tensor:
    """p above; 0 for a query that sees no key."""
    found = (scores - sums.unsqueeze(-1)).exp()
    return found.masked_fill(sums.unsqueeze(-1) == float("-inf"), 0.0)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which blocks add up: that of x, float32 at least."""
    return torch.float32 if x.dtype in _HALF else x.dtype


def _wide(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x))


def grouped(x: Tensor, heads: int) -> Tensor:
    """[batch, heads, n, d] as [batch, heads of keys, heads of queries for each, n, d], in the dtype of sums."""
    found: Tensor = _wide(x).unflatten(1, (heads, x.shape[1] // heads))
    return found


def _as_scores(mask: Tensor, scores: Tensor) -> Tensor:
    """A mask that broadcasts to [batch, heads, n, m], in the shape of grouped scores."""
    every = mask.expand(scores.shape[0], scores.shape[1] * scores.shape[2], *scores.shape[3:])
    found: Tensor = every.unflatten(1, scores.shape[1:3])
    return found


def _summed_to(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient [batch, heads, n, m] summed over what the mask was broadcast along."""
    return gradient.sum_to_size(mask.shape)
