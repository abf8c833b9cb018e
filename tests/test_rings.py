"""A ring's reduce-scatter gives the sum, the same bits in every run."""

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from autoddl import rings
from autoddl.rings import reduce_scatter


def _buffer(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def _scattered(elements: int, dtype: torch.dtype, segment_bytes: int) -> tuple[float, bool]:
    """The largest error against the sum in float64, and whether a second run gives the same bits."""
    before, rings.SEGMENT_BYTES = rings.SEGMENT_BYTES, segment_bytes
    try:
        buffer = _buffer(elements, dtype)
        kept = buffer.clone()
        found, again = reduce_scatter(buffer), reduce_scatter(buffer)
    finally:
        rings.SEGMENT_BYTES = before
    assert torch.equal(buffer, kept)
    total = buffer.double()
    dist.all_reduce(total)
    wanted = total.view(dist.get_world_size(), -1)[dist.get_rank()]
    return float((found.double() - wanted).abs().max()), torch.equal(found, again)


def test_every_rank_gets_the_sum_of_its_chunk() -> None:
    for elements, segment_bytes in ((8, 2**19), (4 * 1000, 256), (4 * 1001, 4096), (4 * 300_000, 2**19)):
        for error, same in on_ranks(4, _scattered, elements, torch.float32, segment_bytes):
            assert error < 1e-5 and same
    for error, same in on_ranks(2, _scattered, 2 * 777, torch.float64, 64):
        assert error < 1e-12 and same


def _in_pairs() -> bool:
    """Two groups of two ranks at the same time, and one rank alone."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    found = reduce_scatter(torch.arange(6.0) * (rank + 1), pairs[rank % 2])
    wanted = torch.arange(6.0).view(2, 3)[rank // 2] * (2 * (rank % 2) + 4)
    return torch.equal(found, wanted) and torch.equal(reduce_scatter(wanted, alone[rank]), wanted)


def test_groups_work_at_once_and_one_rank_sends_nothing() -> None:
    assert all(on_ranks(4, _in_pairs))
