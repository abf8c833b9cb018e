"""A rank reads only the rows of a dataset that its plan gives it, and trains as one process on whole batches does."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from tiny import tiny
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, get_worker_info

import autoddl
from autoddl.core.errors import InputError, MismatchError
from autoddl.cost_models import parse_cluster

ROWS, STEPS = 8, 5
PLACE = """
name: pair
device: {name: cpu, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}
levels: [{name: machine, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of tokens by index; `read` are the indices that were asked for."""

    def __init__(self, count: int = 27) -> None:
        self.ids = torch.randint(0, 64, (count, 6), generator=torch.Generator().manual_seed(1))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.ids[index], self.ids[index].roll(-1)


class Alone(nn.Module):
    """A model of one input, which data parallel ranks read split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.zeros(ROWS, 6),)


def model_of(name: str) -> nn.Module:
    return Alone() if name == "alone" else tiny(2, dropout=0.0)


def first_alone(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor]:
    return (torch.stack([ids for ids, _ in items]) / 64,)


def mixed(items: list[tuple[Tensor, Tensor]]) -> Any:
    """Rows in an order and with tokens that three libraries draw."""
    order = torch.randperm(len(items)).tolist()
    random.shuffle(order)
    return tuple((part[order] + int(np.random.randint(64))) % 64 for part in default_collate(items))


class Marked(Rows):
    """Draws in the items too; its workers know it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        assert info is None or getattr(info.dataset, "ids", None) is self.ids  # the loader's wrapper says what it has
        ids, target = super().__getitem__(index)
        return (ids + torch.randint(64, ())) % 64, target


def pieces_drawn(path: str, workers: int) -> list[Tensor]:
    """This rank's pieces of two epochs, of which the second goes on from a state, seeded as no other rank is."""
    model = autoddl.parallelize(model_of("tiny"), autoddl.load_plan(path))
    seed = 1 + model.groups.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    given: dict[str, Any] = {"collate_fn": mixed, "num_workers": workers}
    loader, other = (autoddl.RankLoader(model, Marked(), seed=3, **given) for _ in range(2))
    found = [batch for _, batch in zip(range(4), itertools.chain(loader, loader), strict=False)]
    other.load_state_dict({"epoch": 1, "taken": 0, "seed": 3})
    again = next(iter(other))
    pieces = [value for batch in found for part in batch.parts for _, value in sorted(part.items())]
    last = [value for part in again.parts for _, value in sorted(part.items())]
    assert all(torch.equal(a, b) for a, b in zip(pieces[-len(last):], last, strict=True))
    return pieces


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_the_same_rows_draw_alike_however_they_are_seeded(workers: int, tmp_path: Path) -> None:
    autoddl.plan(model_of("tiny"), parse_cluster(PLACE % 2, "test"), workers=1, mine="tp=2").save(tmp_path / "two.json")
    one, other = on_ranks(2, pieces_drawn, str(tmp_path / "two.json"), workers)
    assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[-2])


def trained(name: str, path: str, count: int = STEPS) -> tuple[list[float], int, int]:
    """The losses of some steps over epochs of three batches, and how many rows this rank read, in all and at once."""
    model, data = autoddl.parallelize(model_of(name), autoddl.load_plan(path)), Rows()
    collate = first_alone if name == "alone" else default_collate
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    loader = autoddl.RankLoader(model, data, seed=3, collate_fn=collate)
    assert len(loader) == 3
    while len(losses) < count:
        for batch in loader:
            losses.append(float(model.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) == count:
                break
    other = autoddl.RankLoader(model, Rows(), seed=0, collate_fn=collate)
    other.load_state_dict(loader.state_dict())
    left = [parts for batch in other for part in batch.parts for parts in part.values()]
    right = [parts for batch in loader for part in batch.parts for parts in part.values()]
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    return losses, len(set(data.read)), len(model.rows())


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "options", "rows"), [
    ("alone", {"mine": "dp=2", "microbatches": (2,)}, (4, 4)), ("tiny", {"mine": "tp=2"}, (8, 8)),
    ("tiny", {"cut": ("blocks.1",), "microbatches": (2,)}, (8, 8))], ids=["dp", "tp", "stages"])
def test_ranks_read_their_rows_and_train_as_one_process(name: str, options: dict[str, object], rows: tuple[int, int],
                                                        tmp_path: Path) -> None:
    model = model_of(name)
    for file, size, asked in (("two", 2, options), ("one", 1, {})):
        autoddl.plan(model, parse_cluster(PLACE % size, "test"), workers=1, **asked).save(  # type: ignore[arg-type]
            tmp_path / f"{file}.json")
    found = on_ranks(2, trained, name, str(tmp_path / "two.json"))
    whole, _, every = trained(name, str(tmp_path / "one.json"))
    assert every == ROWS and tuple(one[2] for one in found) == rows
    assert {one[1] for one in found} <= ({27} if rows == (8, 8) else set(range(12, 27)))
    for losses, _, _ in found:
        assert losses == pytest.approx(whole, rel=1e-5)


class Normed(Alone):
    """A model that evaluation computes otherwise than training does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3 if self.training else 1)


@pytest.mark.parametrize("parts", [1, 2])
def test_pieces_cut_in_training_are_evaluated_after_eval_or_refused(parts: int) -> None:
    made = autoddl.plan(Normed(), parse_cluster(PLACE % 1, "test"), workers=1, microbatches=(parts,))
    model, x = autoddl.parallelize(Normed(), made), torch.randn(ROWS, 6)
    given = [model.local_batch(x), model.batch_of_rows(x)]
    trained = float(model(given[0]))
    model.eval()
    want = float(model(x))
    assert trained == pytest.approx(3 * want) and float(model.step(given[0])) == pytest.approx(3 * want)
    for one in given:
        if parts == 1:
            assert float(model(one)) == want
            continue
        with pytest.raises(MismatchError, match=r"cut for training, .*: give the global batch, or make them by local_"):
            model(one)
    assert float(model(model.local_batch(x))) == want


def test_a_dataset_of_less_than_a_batch_is_refused(tmp_path: Path) -> None:
    model = autoddl.parallelize(tiny(1), autoddl.plan(tiny(1), parse_cluster(PLACE % 1, "test"), workers=1))
    with pytest.raises(InputError, match="reads batches of 8 rows, and the dataset has 7 items: give more items"):
        autoddl.RankLoader(model, Rows(7))
