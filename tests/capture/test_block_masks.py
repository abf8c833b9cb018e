"""Block masks of FlexAttention in samples and batches: their text, their tensors, and other masks than the plan's."""

from typing import Any

import flexible
import pytest
import torch
from random_plans import random_plan
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from autoddl.capture.block_masks import WrittenMask
from autoddl.capture.capture import capture
from autoddl.capture.sample import as_sample, describe, from_spec, named, parted
from autoddl.core.errors import InputError, MismatchError
from autoddl.operators.flexible import FLEXIBLE
from autoddl.runtime.parallelize import parallelize

LENGTH = flexible.LENGTH


def batch(mask: Any = None, rows: int = 4) -> tuple[Any, ...]:
    _, (tokens, labels, made) = flexible.model("given", batch=rows)
    return tokens, labels, made if mask is None else create_block_mask(mask, rows, None, LENGTH, LENGTH, "cpu", 16)


def test_a_mask_of_a_sample_is_its_text_and_the_tensors_that_it_reads() -> None:
    module, _ = flexible.model("given")
    sample = as_sample(batch())
    found = named(module.forward, sample)
    assert list(found) == ["tokens", "labels", "mask.mask_mod", "mask.x0"]
    assert found["mask.mask_mod"] == "bitwise_and(ge(q, k), eq(x0[b, q], x0[b, k]))"
    again = from_spec(describe(sample))
    assert describe(again) == describe(sample) and isinstance(again.args[2], BlockMask)
    fingerprints = {capture(module, one).graph.fingerprint() for one in (sample, again, batch())}
    assert len(fingerprints) == 1


def test_the_tensors_of_a_mask_are_cut_into_microbatches() -> None:
    part = parted(as_sample(batch()), 2, 1)
    assert isinstance(part.args[2], WrittenMask) and part.args[2].read[0].equal(as_sample(batch()).args[2].read[0][2:])
    made = capture(flexible.model("given")[0], part)
    op = next(op for op in made.graph.ops if op.target == FLEXIBLE)
    assert [made.graph.tensors[t].shape[0] for t in op.inputs] == [2] * 4


def test_a_mask_that_is_a_table_alone_is_refused() -> None:
    table = torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    with pytest.raises(InputError, match=r"by a table alone .* make it with create_block_mask\(mask_mod"):
        as_sample((BlockMask.from_kv_blocks(table[..., 0] + 1, table, BLOCK_SIZE=16),))


def test_a_mask_of_more_than_single_elements_is_refused() -> None:
    lengths = torch.tensor([3, 4])
    with pytest.raises(InputError, match=r"computes aten.sum.default of more than single elements.*as x\[b, q\]"):
        as_sample((create_block_mask(lambda b, h, q, k: q < lengths.sum(), None, None, LENGTH, LENGTH, "cpu"),))


def test_a_batch_has_the_mask_of_the_plan_whatever_it_reads() -> None:
    module, _ = flexible.model("given")
    made = capture(module, batch())
    parallel = parallelize(module, random_plan(made, 0, "one=1"), captured=made)
    tokens, labels, mask = batch()
    others = create_block_mask(lambda b, h, q, k: (q >= k) & (labels[b, q] == labels[b, k]), 4, None, LENGTH, LENGTH,
                               "cpu", 16)
    assert parallel.step((tokens, labels, mask)) != parallel.step((tokens, labels, others))
    with pytest.raises(MismatchError, match=r"mask\.mask_mod is 'le\(q, k\)', the plan was made for 'bitwise_and\("):
        parallel.step(batch(lambda b, h, q, k: q <= k))
