"""Our collectives give what the definition says: the same bits in every run, and on every rank that has the same."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forget, on_ranks
from shaping import shaping
from torch import Tensor

from autoddl.core.layout import Mesh
from autoddl.cost_models import algorithms, parse_cluster
from autoddl.launch.launch import Place, launch
from autoddl.launch.shaped_network import PORT, shape_links
from autoddl.runtime.collectives.message_collectives import exchange
from autoddl.runtime.collectives.process_groups import Groups

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SLOW = """name: slow
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}
levels:
  - {name: node, size: 2, bandwidth: 100 kB/s, latency: 1 us}
  - {name: net, size: 2, bandwidth: 1 kB/s, latency: 1 us, shared_by: node}
"""
"""Links so slow that ours pay at any size."""


def values(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(elements, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 50, (elements,), generator=generator).to(dtype)


def wanted(kind: str, every: list[Tensor], rank: int, how: str) -> Tensor:
    """By the definition, from what all ranks give; sums in float64."""
    n = len(every)
    if kind == "all-gather":
        return torch.cat(every)
    if kind == "all-to-all":
        return torch.cat([given.view(n, -1)[rank] for given in every])
    stacked = torch.stack(every)
    total = stacked.amax(0) if how == "max" else (stacked.double() if stacked.is_floating_point() else stacked).sum(0)
    return total if kind == "all-reduce" else total.view(n, -1)[rank]


def one(kind: str, given: Tensor, ways: tuple[int, ...], how: str) -> Tensor:
    n, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    sizes = {"all-gather": given.numel() * n, "reduce-scatter": given.numel() // n}
    got = given.new_empty(sizes.get(kind, given.numel()))
    if kind == "all-reduce":
        got = given = given.clone()
    exchange(kind, got, given, ways, group, how=how)
    return got


def run(kind: str, ways: tuple[int, ...], elements: int, dtype: torch.dtype, how: str, segment: int) -> Tensor:
    """Twice; the result, after a check of bits and values."""
    before, algorithms.SEGMENT_BYTES = algorithms.SEGMENT_BYTES, segment
    try:
        rank, n = dist.get_rank(), dist.get_world_size()
        given = values(rank, elements, dtype)
        kept = given.clone()
        first, second = one(kind, given, ways, how), one(kind, given, ways, how)
    finally:
        algorithms.SEGMENT_BYTES = before
    assert torch.equal(given, kept) and torch.equal(first, second)
    truth = wanted(kind, [values(r, elements, dtype) for r in range(n)], rank, how)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    exact = not dtype.is_floating_point or kind in ("all-gather", "all-to-all") or how == "max"
    close = torch.equal(first, truth) if exact else torch.allclose(first.double(), truth, rtol=tolerance,
                                                                   atol=tolerance)
    assert close, (kind, ways, elements, dtype, how, segment)
    return first


Case = tuple[int, torch.dtype, str, int]


def run_all(kind: str, ways: tuple[int, ...], cases: list[Case]) -> list[Tensor]:
    return [run(kind, ways, *case) for case in cases]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", [pytest.param((4,), marks=pytest.mark.slow), (2, 2), (3,)])
def test_every_collective_gives_what_it_should(kind: str, ways: tuple[int, ...]) -> None:
    n = 3 if ways == (3,) else 4
    odd = [1, 2, 7, 1001] if kind == "all-reduce" else [1, 5] if kind == "all-gather" else [n, 7 * n]
    cases: list[Case] = [(elements, torch.float32, "sum", 2**18) for elements in odd]
    cases += [(n * 203, torch.float32, "sum", 64), (n * 40_000, torch.float64, "sum", 2**14),
              (n * 11, torch.bfloat16, "sum", 2**18), (n * 11, torch.int64, "sum", 2**18)]
    if kind == "all-reduce":
        cases += [(13, torch.float32, "max", 2**18), (13, torch.int64, "max", 8)]
    if kind in ("all-gather", "all-to-all"):
        cases += [(n * 11, torch.bool, "sum", 2**18), (n * 11, torch.uint8, "sum", 4)]
    results = on_ranks(n, run_all, kind, ways, cases)
    if kind in ("all-reduce", "all-gather"):
        assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


def several() -> float:
    """Collectives of three groups under way at once, in one order, with one that blocks between them; all are right."""
    mesh = Mesh.parse("a=2,b=2")
    groups = Groups(mesh, [(0,), (1,), (0, 1)], cluster=SLOW)
    rank = groups.rank
    works, wrong = [], 0.0
    for turn in range(6):
        for axes in ((0, 1), (0,), (1,), (0, 1)):
            group = groups.of(axes)
            assert group is not None
            n = group.size()
            given = torch.full((n * 5000,), float(rank + turn))
            got = given.new_empty(5000)
            works.append((groups.start("reduce-scatter", axes, got, given), got, group, turn))
        blocking = torch.full((9,), float(rank))
        assert groups.start("all-reduce", (0, 1), blocking, blocking, asynchronous=False) is None
        wrong = max(wrong, float((blocking - 6).abs().max()))
    for work, got, group, turn in reversed(works):
        work.wait()
        total = sum(r + turn for r in dist.get_process_group_ranks(group))
        wrong = max(wrong, float((got - total).abs().max()))
    last = groups.start("reduce-scatter", (0, 1), torch.empty(1), torch.ones(4))
    told = last.get_future().then(lambda _: wrong)
    last.wait()
    return told.wait()  # type: ignore[no-any-return]


@pytest.mark.ranks
def test_several_are_under_way_at_once() -> None:
    assert on_ranks(4, several) == [0.0] * 4


def far_apart() -> tuple[str, bool]:
    """The algorithm of an all-to-all of few bytes where nodes are far apart, and whether it gives what it should."""
    far = SLOW.replace("1 kB/s, latency: 1 us", "1 GB/s, latency: 1 s")
    groups = Groups(Mesh.parse("a=2,b=2"), [(0, 1)], cluster=far)
    given = torch.arange(8.0) + 10 * groups.rank
    got = torch.empty(8)
    groups.start("all-to-all", (0, 1), got, given).wait()
    truth = [10 * r + 2 * groups.rank + i for r in range(4) for i in range(2)]
    return groups.algorithm("all-to-all", (0, 1), given.nbytes), got.tolist() == truth


@pytest.mark.ranks
def test_an_all_to_all_of_few_bytes_between_far_nodes_goes_in_stages() -> None:
    assert on_ranks(4, far_apart) == [("stages", True)] * 4


def left_alone(rank_that_stays_away: int) -> tuple[float, list[str]]:
    """Seconds until the others are told, and what; a second one, started before, fails too."""
    groups = Groups(Mesh.parse("a=2,b=2"), [(0, 1)], timedelta(seconds=1), SLOW)
    start, said = time.perf_counter(), []
    if groups.rank != rank_that_stays_away:
        works = [groups.start("reduce-scatter", (0, 1), torch.empty(1000), torch.ones(4000)) for _ in range(2)]
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                said.append(str(error))
    return time.perf_counter() - start, said


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_told_within_the_timeout() -> None:
    try:
        results = on_ranks(4, left_alone, 3)
    finally:
        forget(4)
    for elapsed, said in results[:3]:
        assert elapsed < 4 and len(said) == 2 and all("imed out" in text or "closed" in text for text in said)


WORKER = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.core.layout import Mesh
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
groups = [Groups(Mesh.parse("a=2,b=2"), [(0, 1)], cluster=text) for text in (open(sys.argv[1]).read(), None)]
given, got = torch.ones(500_000), torch.empty(125_000)
seconds = [[], []]
for _ in range(4):
    for which in range(2):
        dist.barrier()
        start = time.perf_counter()
        groups[which].start("reduce-scatter", (0, 1), got, given).wait()
        seconds[which].append(time.perf_counter() - start)
        assert bool((got == 4).all())
if dist.get_rank() == 0:
    open(sys.argv[2], "w").write(" ".join(str(min(some)) for some in seconds))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@shaping
def test_on_shaped_links_messages_beat_the_library(tmp_path: Path) -> None:
    """2 MB to scatter over 2 nodes of 2 on links of 12.5 MB/s: 0.04 s by levels, 0.24 s as a flat all-reduce."""
    machine = parse_cluster(SLOW.replace("100 kB/s", "1 GB/s").replace("1 kB/s", "12.5 MB/s"), "slow")
    text, found = tmp_path / "slow.yaml", tmp_path / "found"
    text.write_text(machine.to_yaml())
    with shape_links(machine) as built:
        places = [Place(("ip", "netns", "exec", built.node_of(rank).namespace), {
            "GLOO_SOCKET_IFNAME": PORT, "MASTER_ADDR": built.nodes[0].address, "TORCH_CPP_LOG_LEVEL": "ERROR"})
            for rank in range(4)]
        launch(4, [sys.executable, "-c", WORKER, str(text), str(found)], places=places, timeout=200)
    ours, library = map(float, found.read_text().split())
    assert 1.3 * ours < library
