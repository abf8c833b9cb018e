"""Patches torch 2.13 so that flex_attention is traced as one operator, `autoddl.flex_attention`.

torch traces it as an operator of higher order, whose mask is a table of blocks beside a function. A plan needs the
function alone: its text (`rewrites.element_text`) says what any piece of the queries sees. So while a model is traced,

    create_block_mask    makes a table without values, beside the function that it was given
    flex_attention       writes the operator; it is not compiled, and does not mind that it is on a CPU
    torch.compile(..)    of either of them calls it as it is

    create_mask                            the mask as elementwise operators write it
    _convert_mask_to_block_mask            the mask itself
    _create_sparse_block_from_block_mask   a table without values
    flex_attention_hop                     the operator
    _create_empty_block_mask               a table without values, where no mask was given
    _validate_device                       nothing
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from autoddl.capture.block_masks import empty_block_mask
from autoddl.capture.rewrites.element_text import ElementTexts
from autoddl.capture.rewrites.own_backward import HiddenEffect
from autoddl.operators.flexible import INDICES
from autoddl.operators.kernels.flexible import value_of_text

__all__ = ["MADE_FOR", "PATCHED", "flex_attention_as_operator"]

MADE_FOR = "torch 2.13"
PATCHED = {
    "torch.nn.attention.flex_attention:create_mask": "mod_fn, B, H, Q_LEN, KV_LEN, device",
    "torch.nn.attention.flex_attention:_convert_mask_to_block_mask":
        "mask, Q_BLOCK_SIZE, KV_BLOCK_SIZE, separate_full_blocks",
    "torch.nn.attention.flex_attention:_create_sparse_block_from_block_mask":
        "block_mask, mask_mod, seq_lengths, Q_BLOCK_SIZE, KV_BLOCK_SIZE",
    "torch.nn.attention.flex_attention:_create_empty_block_mask": "query, key",
    "torch.nn.attention.flex_attention:_validate_device": "query, key, value"}
"""The patched functions with the names of their parameters; a test compares both with the installed torch."""

torch.library.define("autoddl::flex_attention", "(Tensor query, Tensor key, Tensor value, Tensor[] read, str score, "
                     "str mask, float scale, bool lse) -> Tensor[]")


@torch.library.register_fake("autoddl::flex_attention")  # type: ignore[untyped-decorator]
def _results(query: Tensor, key: Tensor, value: Tensor, read: list[Tensor], score: str, mask: str, scale: float,
             lse: bool) -> list[Tensor]:
    half = query.dtype in (torch.float16, torch.bfloat16)
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32 if half else query.dtype)
    return [query.new_empty(*query.shape[:-1], value.shape[-1]), sums]


@contextmanager
def flex_attention_as_operator() -> Iterator[None]:
    """While open, calls of flex_attention are traced as operators."""
    values: dict[str, Any] = {
        "create_mask": _dense_mask, "_convert_mask_to_block_mask": _as_it_is,
        "_create_sparse_block_from_block_mask": _without_values, "flex_attention_hop": _operator,
        "_create_empty_block_mask": _everything, "_validate_device": _any_device,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    originals = {name: getattr(library, name) for name in values}
    for name, value in values.items():
        setattr(library, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(library, name, value)


def _dense_mask(mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
                device: Any = "cpu") -> Tensor:
    """The mask [batch, heads, queries, keys], of elementwise operators; a traced model is on the CPU."""
    shape, texts = (B or 1, H or 1, Q_LEN, KV_LEN), ElementTexts()
    of_scores = library._get_mod_type(mod_fn) is library._ModificationType.SCORE_MOD
    text = texts.text(mod_fn, "score_mod" if of_scores else "mask_mod", torch.float32 if of_scores else None)
    known = {name: torch.arange(n).view([-1 if k == dim else 1 for k in range(4)])
             for dim, (name, n) in enumerate(zip(INDICES, shape, strict=True))}
    known |= {f"x{i}": x for i, x in enumerate(texts.read)} | ({"s": torch.zeros(shape)} if of_scores else {})
    found = torch.as_tensor(value_of_text(text, known, (), torch.float32))
    return (~torch.isneginf(found) if of_scores else found).expand(shape)


def _as_it_is(mask: Tensor, Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128,
              separate_full_blocks: bool = False) -> tuple[Tensor, None]:
    return mask, None


def _without_values(block_mask: tuple[Tensor, None], mask_mod: Callable[..., Any], seq_lengths: tuple[int, int],
                    Q_BLOCK_SIZE: int, KV_BLOCK_SIZE: int) -> Any:
    return empty_block_mask(block_mask[0].shape, (Q_BLOCK_SIZE, KV_BLOCK_SIZE), mask_mod)


def _everything(query: Tensor, key: Tensor) -> Any:
    """The block mask of a call without one, which has a single block."""
    return empty_block_mask((1, 1, query.shape[-2], key.shape[-2]), (library._LARGE_SPARSE_BLOCK_SIZE,) * 2,
                            library.noop_mask)


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    return None


def _operator(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...],
              scale: float, kernel_options: Any, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the operator; the third result stands for the maxima of the scores, which it does not compute."""
    texts, mask_mod, width = ElementTexts(), block_mask[-1], block_mask[-2]
    if (kernel_options or {}).get("OUTPUT_MAX"):
        raise HiddenEffect("flex_attention is asked for the maxima of its scores, which a plan does not compute: leave "
                           "max_scores out of return_aux")
    if mask_mod is library.noop_mask and width != library._LARGE_SPARSE_BLOCK_SIZE:
        raise HiddenEffect("a BlockMask of flex_attention says by a table alone what is seen, which a plan cannot "
                           "split: make it with create_block_mask(mask_mod, ..)")
    mask = "" if mask_mod is library.noop_mask else texts.text(mask_mod, "mask_mod")
    score = "" if score_mod is library._identity else texts.text(score_mod, "score_mod", query.dtype)
    score = "" if score == "s" else score
    out, sums = torch.ops.autoddl.flex_attention(query, key, value, texts.read, score, mask, scale, True)
    return out, sums, sums
