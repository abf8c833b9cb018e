"""Ranks whose cluster has switches that reduce send through those that are offered, and by rings where none are."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from loopback_switches import TOKEN, switch
from ranks import on_ranks

from autoddl.core.layout import Mesh
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.switches.offered import SWITCHES, OfferedLevel, Switches

SLOW = """name: switched
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}
levels:
  - {name: node, size: 2, bandwidth: 1 kB/s, latency: 1 us, reduces: {block: 64 B}}
  - {name: net, size: 2, bandwidth: 10 kB/s, latency: 1 us, shared_by: node, reduces: {block: 1 kB}}
"""
"""Over both levels switches pay; pairs alone exchange as much by themselves."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64)


def sums(offered: str | None) -> list[object]:
    """Sums over each axis and both, two under way at once; the algorithm, and whether each is the same on all ranks."""
    before = os.environ.pop(SWITCHES, None)
    if offered is not None:
        os.environ[SWITCHES] = offered
    try:
        groups = Groups(Mesh.parse("net=2,node=2"), [(0,), (1,), (0, 1)], timedelta(seconds=20), SLOW)
    finally:
        os.environ.pop(SWITCHES, None)
        os.environ.update({SWITCHES: before} if before is not None else {})
    found: list[object] = [groups.algorithm("all-reduce", (0, 1), 40_000)]
    for dtype in DTYPES:
        for axes in ((0,), (1,), (0, 1)):
            group = groups.of(axes)
            assert group is not None
            each = [(torch.arange(1001) * (rank + 1)).to(dtype) for rank in dist.get_process_group_ranks(group)]
            mine = [(torch.arange(1001) * (groups.rank + 1)).to(dtype) for _ in range(2)]
            later = groups.start("all-reduce", axes, mine[0], mine[0])
            assert groups.start("all-reduce", axes, mine[1], mine[1], asynchronous=False) is None
            later.wait()
            torch.testing.assert_close(mine[0], sum(each[1:], each[0]), rtol=0.02 if dtype.itemsize == 2 else 1e-6,
                                       atol=0)
            assert torch.equal(*mine)
    return found


@pytest.mark.ranks
def test_ranks_reduce_in_the_switches_that_are_offered_and_by_rings_without() -> None:
    with switch() as (top, _), switch(above=top) as (left, _), switch(above=top) as (right, _):
        offered = Switches(TOKEN, (OfferedLevel("node", 2, (left, right)), OfferedLevel("net", 4, (top,))))
        assert on_ranks(4, sums, offered.to_text()) == [["switch tree"]] * 4
    assert on_ranks(4, sums, None) == [["ring"]] * 4
