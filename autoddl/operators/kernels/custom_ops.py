"""Our own operators, written plainly for one device: what `autoddl.NAME` in a graph means.

Randomness is stateless (`draws`): what an element draws follows from its position in the whole tensor, so every layout
of the tensor draws the same. A rank that has only a shard gives its place with `index`. `key` numbers the draw in the
graph, `seed` the step. The captured program has seed 0 and whole tensors; lowering binds the real ones.

The loss of a batch is a mean over its valid tokens, and a mean of unequal shards is no mean: it is split into

    token_loss = sum of the tokens' losses        token_weight = sum of the valid tokens' weights

both of which are sums over shards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from autoddl.core.errors import InputError
from autoddl.operators.kernels.draws import Index, drawn, keep_mask
from autoddl.operators.kernels.experts import ExpertPart, routed_experts
from autoddl.operators.kernels.flexible import Elements, Places, flexible_attention
from autoddl.operators.kernels.grouped import rows_of_groups
from autoddl.operators.kernels.quantiles import variates

__all__ = ["BY_VALUES", "DRAWING", "Index", "attention", "checked", "ctc_loss", "draw", "dropout", "embedding_bag",
           "experts", "flex_attention", "grouped_mm", "keep_mask", "token_loss", "token_weight",
           "variate"]

DRAWING = frozenset(("autoddl.dropout", "autoddl.attention", "autoddl.draw"))
"""Operators that draw random numbers, as targets of a graph."""
BY_VALUES = frozenset(("autoddl.experts", "autoddl.grouped_mm", "autoddl.checked", "autoddl.flex_attention",
                       "autoddl.variate"))
"""Operators whose kernels take sizes from values or check them, for which they wait."""

def dropout(x: Tensor, p: float, key: int, seed: int = 0, index: Index | None = None) -> Tensor:
    """x / (1 - p) where kept, else 0. `index` places x in the whole tensor."""
    if p >= 1:
        return x * 0.0
    keep = keep_mask(tuple(x.shape), p, key, seed, index, x.device)
    return torch.where(keep, x * (1 / (1 - p)), 0.0)


def draw(size: list[int], law: str, first: float, second: float, dtype: torch.dtype,
         device: torch.device | str = "cpu", key: int = 0, expected: float | None = None, seed: int = 0,
         index: Index | None = None) -> Tensor:
    """A tensor of random numbers by a law of `draws`. `index` places a piece of this `size` in the whole tensor.

    In evaluation every element is `expected`, where that is given, by the law `constant`: layers that scale by what
    they draw ask for it."""
    if law == "constant":
        return torch.full(size, first, dtype=dtype, device=device)
    return drawn(tuple(size), law, first, second, dtype, device, key, seed, index)


def variate(u: Tensor, law: str, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Computes what follows a law of `quantiles` with these numbers, of uniform numbers u: each element apart."""
    return variates(u, law, first, second)


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, dropout_key: int = 0,
              seed: int = 0, index: Index | None = None) -> Tensor:
    """scaled_dot_product_attention with our dropout. `index` places the probabilities (..., heads, queries, keys)."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1),
                                    float("-inf"))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is None:
        return dropout(scores.softmax(-1), dropout_p, dropout_key, seed, index) @ value
    blind = (scores == float("-inf")).all(-1, keepdim=True)  # who may see nothing sees zeros, as PyTorch has it
    shares = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return dropout(shares, dropout_p, dropout_key, seed, index) @ value


def flex_attention(query: Tensor, key: Tensor, value: Tensor, read: Sequence[Tensor] = (), score: str = "",
                   mask: str = "", scale: float | None = None, lse: bool = False, index: Places | None = None
                   ) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose scores and mask are texts (`operators.flexible`) that read elements of tensors.

    With `lse` it also returns the logarithms of the sums of exponentials. `index` places the pieces."""
    own = query.shape[-1] ** -0.5 if scale is None else scale
    places = ((0, 0, 0), ()) if index is None else index
    out, sums = flexible_attention(Elements(score, mask, own, places), query, key, value, read)
    return (out, sums) if lse else out


def experts(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None = None,
            down_bias: Tensor | None = None, gate: str = "mul(silu(a), b)", halves: int = 2, paired: bool = False,
            transposed: bool = False, count: int = 0) -> Tensor:
    """The sum of each token's chosen experts, weighted by its shares; `kernels.experts` has formulas and shapes.

    `halves` is the number of inputs of the gate, `count` that of all experts, 0 where all are here."""
    return routed_experts(ExpertPart(gate, halves, paired, transposed), x, chosen, shares, up, down, up_bias, down_bias)


def embedding_bag(weight: Tensor, indices: Tensor, per_sample_weights: Tensor | None = None, mode: int = 0) -> Tensor:
    """Sums (0), means (1) or maxima (2) of rows of a table (v, d), for bags of indices (b, n): (b, d)."""
    return F.embedding_bag(indices, weight, mode=("sum", "mean", "max")[mode], per_sample_weights=per_sample_weights)


def checked(x: Tensor, condition: Tensor, value: bool, text: str) -> Tensor:
    """The tensor itself, where the condition has this value; else InputError, on a GPU an assertion of the device.

    `text` is the condition as the model's source has it, and its line."""
    if condition.is_cuda:
        torch._assert_async(condition.bool() == value, f"the model refuses this batch at {text}")
    elif type(condition) is Tensor and not condition.is_meta and bool(condition) != value:
        raise InputError(f"the model refuses this batch at {text} is {not value}; give a batch that it takes")
    return x.view_as(x)


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, count: int = 0) -> Tensor:
    """The rows of each of `count` groups times its matrix; `kernels.grouped` has the formula."""
    return rows_of_groups(rows, weight, ends)


def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
             zero_infinity: bool = False) -> Tensor:
    """Computes connectionist temporal classification: losses (n) of targets (n, s).

    The log-probabilities are (t, n, c), of t steps; `blank` is the class of no label.
    """
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


def token_loss(logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
               label_smoothing: float = 0.0) -> Tensor:
    """Sum of the tokens' cross entropies; float32 for half precision logits, whose own sum would lose or overflow."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        losses = F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction="none",
                                 label_smoothing=label_smoothing)
        return losses.sum(dtype=torch.float32)
    return F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction="sum",
                           label_smoothing=label_smoothing)


def token_weight(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
                 dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum of the class weights of the valid tokens; without weights, their number."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return (weight[target.where(valid, 0)] * valid).sum().to(dtype)
