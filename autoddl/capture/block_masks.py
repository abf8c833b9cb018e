"""Lets a sample or a batch hold block masks of FlexAttention, which are made outside of the model.

    BlockMask  ->  WrittenMask      the text of its mask_mod (`operators.flexible`), and the tensors that it reads

The tensors are inputs of the model, cut into microbatches and pieces like any other. The text is a plain value, so that
every batch must have that of the plan. A mask without values makes the blocks anew: its table is none of its parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.utils import _pytree as pytree

from autoddl.capture.rewrites.element_text import ElementTexts
from autoddl.capture.rewrites.own_backward import HiddenEffect
from autoddl.core.errors import InputError
from autoddl.operators.flexible import INDICES
from autoddl.operators.kernels.flexible import value_of_text

__all__ = ["WrittenMask", "described_mask", "empty_block_mask", "mask_from_spec", "with_written_masks"]


class WrittenMask(BlockMask):
    """A block mask that is a text and the tensors that it reads; its table has no values."""

    def __init__(self, text: str, read: Sequence[Tensor], lengths: Sequence[int], block: Sequence[int]) -> None:
        def mask_mod(*at: Tensor) -> Any:
            known = {**dict(zip(INDICES, at, strict=True)), **{f"x{i}": x for i, x in enumerate(self.read)}}
            return value_of_text(self.text, known, (), torch.float32)

        one = empty_block_mask((1, 1, *lengths), block, mask_mod)
        super().__init__(one.seq_lengths, one.kv_num_blocks, one.kv_indices, None, None, None, None, None, None,
                         one.BLOCK_SIZE, mask_mod)
        self.text, self.read = text, tuple(read)


def empty_block_mask(shape: Sequence[int], block: Sequence[int], mask_mod: Any) -> BlockMask:
    """A block mask [batch, heads, queries, keys] whose table has a shape and no values."""
    batch, heads, queries, keys = shape
    counts = torch.empty(batch, heads, -(-queries // block[0]), dtype=torch.int32)
    table = torch.empty(*counts.shape, -(-keys // block[1]), dtype=torch.int32)
    return BlockMask((queries, keys), counts, table, None, None, None, None, None, None, (block[0], block[1]), mask_mod)


def with_written_masks(value: Any) -> Any:
    """The value with every block mask inside as its text. Raises InputError for one that has none."""
    return pytree.tree_map(lambda leaf: _written(leaf) if type(leaf) is BlockMask else leaf, value,
                           is_leaf=lambda leaf: type(leaf) is BlockMask)


def _written(mask: BlockMask) -> WrittenMask:
    if mask.mask_mod is noop_mask:
        raise InputError("a BlockMask of the sample says by a table alone what is seen, which a plan cannot split: "
                         "make it with create_block_mask(mask_mod, ..)")
    texts = ElementTexts()
    try:
        text = texts.text(mask.mask_mod, "mask_mod")
    except HiddenEffect as error:
        raise InputError(f"the sample has a BlockMask which a plan cannot split: {error}") from None
    return WrittenMask(text, texts.read, mask.seq_lengths, mask.BLOCK_SIZE)


def described_mask(mask: WrittenMask) -> dict[str, Any]:
    """The mask as JSON, but for the tensors that it reads."""
    return {"block_mask": mask.text, "lengths": list(mask.seq_lengths), "block": list(mask.BLOCK_SIZE)}


def mask_from_spec(spec: Mapping[str, Any], read: Sequence[Tensor]) -> WrittenMask:
    """The mask that was described, which reads these tensors."""
    return WrittenMask(spec["block_mask"], read, spec["lengths"], spec["block"])


def _flatten(mask: WrittenMask) -> tuple[list[Any], tuple[Any, ...]]:
    return [mask.text, *mask.read], (tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE))


def _with_keys(mask: WrittenMask) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    values, context = _flatten(mask)
    names = ["mask_mod", *(f"x{i}" for i in range(len(mask.read)))]
    return [(pytree.GetAttrKey(name), value) for name, value in zip(names, values, strict=True)], context


def _unflatten(values: Any, context: Any) -> WrittenMask:
    text, *read = values
    return WrittenMask(text, read, *context)


pytree.register_pytree_node(WrittenMask, _flatten, _unflatten, serialized_type_name="autoddl.WrittenMask",
                            flatten_with_keys_fn=_with_keys)
