"""A sparse sum sends few words, keeps what it does not send, and with exact thresholds it is the top k of the sum."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from autoddl.core.sparse import RENEWED, SparseRule, entries, word_limit
from autoddl.runtime.collectives.sparse_sum import SparseSent, SparseSum, Swap

N, SHARE, STEPS = 16_000, 0.01, RENEWED + 4


@dataclass
class Room:
    """Ranks that are threads of one process, and swap through a table."""

    ranks: int
    table: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=30)

    def swap_of(self, rank: int) -> Swap:
        def swap(given: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
            self.table[rank] = [x.clone() for x in given]
            self.barrier.wait()
            got = [self.table[r][rank] for r in range(self.ranks)]
            self.barrier.wait()
            assert [len(x) for x in got] == list(expected) and all(x.dtype == torch.int32 for x in got)
            return got

        return swap


@dataclass
class Ran:
    """What one rank was given and got, step by step, and its state at the end."""

    gradients: list[Tensor]
    sums: list[Tensor]
    sent: list[SparseSent]
    state: SparseSum


Draw = Callable[[int, int], Tensor]
"""(rank, step) -> a gradient."""


def run(ranks: int, steps: int, draw: Draw, rule: str = f"{SHARE}", renewed: int = RENEWED) -> list[Ran]:
    room, found, errors = Room(ranks), dict[int, Ran](), list[BaseException]()

    def work(rank: int) -> None:
        try:
            state = SparseSum(SparseRule.parse(rule), ranks, rank, torch.zeros(draw(0, 0).numel()), renewed=renewed)
            one = Ran([], [], [], state)
            for step in range(steps):
                one.gradients.append(draw(rank, step))
                total, sent = state.add([one.gradients[-1]], room.swap_of(rank))
                one.sums.append(total)
                one.sent.append(sent)
            found[rank] = one
        except BaseException as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(ranks)]


def even(rank: int, step: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank))


def skewed(rank: int, step: int) -> Tensor:
    """Nearly all that is large lies in the first of many layers, and every rank has a part of it of its own."""
    return even(rank, step) * torch.linspace(3, 0.1, N)**3 + 0.3 * even(99, 0) * (torch.arange(N) // 1000 % 8 == rank)


@lru_cache
def ran(ranks: int, skew: bool) -> list[Ran]:
    return run(ranks, STEPS, skewed if skew else even)


def lost(every: Sequence[Ran]) -> float:
    """What of the gradients was neither sent nor kept, over the largest sum of them."""
    given, left = (torch.stack(many).double().sum(0) for many in (
        [x for one in every for x in one.gradients], [*every[0].sums, *(one.state.residual for one in every)]))
    return float((given - left).abs().max() / given.abs().max().clamp_min(1e-300))


@pytest.mark.parametrize("skew", [False, True])
def test_no_step_without_renewal_sends_more_than_six_words_for_each_entry(skew: bool) -> None:
    most = {}
    for ranks in (2, 4, 8):
        k = entries(SHARE, N, ranks)
        rows = [one.sent for one in ran(ranks, skew)]
        assert [sent.renewed for sent in rows[0]] == [step % RENEWED == 0 for step in range(STEPS)]
        words = [sent.words for row in rows for sent in row if not sent.renewed]
        most[ranks] = max(words)
        assert max(words) <= 6 * k * (ranks - 1) / ranks and all(sent.fits for row in rows for sent in row)
        assert min(words) > k * (ranks - 1) / ranks, "something is sent"
    assert most[8] <= 1.25 * most[4], "the words hardly grow with the ranks"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("skew", [False, True])
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(ranks: int, skew: bool) -> None:
    every = ran(ranks, skew)
    assert lost(every) <= 1e-6
    for one in every[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one.sums, every[0].sums, strict=True))
    k = entries(SHARE, N, ranks)
    assert all(0.5 * k <= int((total != 0).sum()) <= k for total in every[0].sums)


def exact(rows: Sequence[Tensor], k: int) -> Tensor:
    """The top k of the sum of each rank's top k."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        index = row.abs().topk(k).indices
        total[index] += row[index]
    found, index = torch.zeros_like(total), total.abs().topk(k).indices
    found[index] = total[index]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("draw", [even, skewed])
def test_with_exact_thresholds_it_is_the_top_k_of_the_sum(ranks: int, draw: Draw) -> None:
    every, k = run(ranks, 3, draw, renewed=1), entries(SHARE, N, ranks)
    held = [torch.zeros(N) for _ in range(ranks)]
    for step in range(3):
        rows = [kept + draw(rank, step) for rank, kept in enumerate(held)]
        wanted = exact(rows, k)
        assert torch.equal(every[0].sums[step], wanted)
        for rank, row in enumerate(rows):
            sent = torch.zeros(N, dtype=torch.bool)
            sent[row.abs().topk(k).indices] = True
            held[rank] = torch.where(sent & (wanted != 0), 0.0, row)
    for one, kept in zip(every, held, strict=True):
        assert torch.equal(one.state.residual, kept)


ODD: dict[str, Draw] = {
    "zeros": lambda rank, step: torch.zeros(5000), "equal": lambda rank, step: torch.ones(5000),
    "signs": lambda rank, step: torch.ones(5000) * (-1.0)**rank, "one": lambda rank, step: torch.ones(1) * rank,
    "few": lambda rank, step: (torch.arange(5000) == 17 * rank).float() * 3,
    "late": lambda rank, step: even(rank, step)[:5000] * (step > 1),
    "denormal": lambda rank, step: even(rank, step)[:5000] * 1e-40}


@pytest.mark.parametrize("name", ODD)
def test_odd_gradients_are_conserved_within_the_words(name: str) -> None:
    every = run(4, 6, ODD[name], renewed=4)
    assert lost(every) <= 1e-6
    k = every[0].state.kept
    assert all(int((total != 0).sum()) <= k and one.fits for total, one in zip(every[0].sums, every[0].sent,
                                                                             strict=True))


def test_a_warm_up_adds_up_whole_and_momentum_is_that_of_sgd() -> None:
    every = run(3, 6, even, f"{SHARE},warmup=4,momentum=0.9", renewed=2)
    velocity = torch.zeros(N, dtype=torch.float64)
    for step in range(4):
        velocity = 0.9 * velocity + sum(one.gradients[step].double() for one in every)
        assert torch.allclose(every[0].sums[step].double(), velocity, atol=1e-4), "as whole sums would"
        assert all(torch.equal(one.sums[step], every[0].sums[step]) for one in every)
        assert every[0].sent[step].whole and sum(one.sent[step].words for one in every) == 2 * 2 * N
    assert [one.renewed for one in every[0].sent] == [False] * 4 + [True, False], "thresholds come with sparse sums"
    assert all(one.fits for ran in every for one in ran.sent)
    state, k = every[1].state, entries(SHARE, N, 3)
    assert int((every[0].sums[5] != 0).sum()) <= k
    assert all(torch.equal(ran.state.residual == 0, ran.state.velocity == 0) for ran in every)
    assert 0 < int((state.velocity == 0).sum()) <= k, "what was sent is forgotten"


def test_a_share_that_falls_sends_the_words_of_its_own_share_in_every_step() -> None:
    rule, ranks = SparseRule.parse(f"{SHARE},warmup=1,falls=10"), 4
    assert rule.stairs == (0.25, 0.0625, 0.015625) and SparseRule.parse(str(rule)) == rule
    shares = [rule.share_at(step) for step in range(12)]
    assert shares == [0.25] * 4 + [0.0625] * 3 + [0.015625] * 3 + [SHARE] * 2
    assert not SparseRule.parse("0.5,falls=9").stairs and SparseRule.parse("0.5,falls=9").share_at(3) == 0.5
    every = run(ranks, 13, even, str(rule))
    assert lost(every) <= 1e-6
    for step, share in enumerate(shares, 1):
        k, sent = entries(share, N, ranks), [one.sent[step] for one in every]
        assert all(one.renewed == (step in (1, 5, 8, 11)) and one.limit == word_limit(k, ranks) for one in sent)
        assert all(one.fits and one.words > k * (ranks - 1) / ranks for one in sent)
        assert 0.5 * k <= int((every[0].sums[step] != 0).sum()) <= k, "k falls with the share"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [4, 5])
def test_what_is_not_finite_is_seen_and_not_kept(bad: float, step: int) -> None:
    def draw(rank: int, at: int) -> Tensor:
        x = even(rank, at)[:5000].clone()
        x[321] = bad if (rank, at) == (1, step) else x[321]
        return x

    every = run(2, 8, draw, renewed=4)
    assert not torch.isfinite(every[0].sums[step][321])
    assert all(torch.isfinite(total).all() for at, total in enumerate(every[0].sums) if at != step)
    assert all(torch.isfinite(one.state.residual).all() for one in every)
