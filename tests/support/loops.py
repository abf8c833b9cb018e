"""What tests of other libraries' loops share: a launcher's environment on a rank, and a small classifier with data."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from planmaker import cluster_of
from ranks import shared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autoddl
from autoddl.core.plan import Plan

__all__ = ["ROWS", "Classifier", "alone", "data", "launched", "loader", "planned", "whole"]

ROWS = 8


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = self.down(F.relu(self.norm(self.up(x))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def data() -> TensorDataset:
    """Four batches and a half."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS * 4 + ROWS // 2, 12, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 8, (len(x),), generator=generator))


def loader(shuffle: bool = False) -> "DataLoader[Any]":
    """All rows in a random order, the last batch short; or two batches to evaluate."""
    return DataLoader(data() if shuffle else TensorDataset(*data()[:2 * ROWS]), batch_size=ROWS, shuffle=shuffle)


@shared
def planned(mesh: str) -> Plan:
    """A plan that splits the first weight on every axis."""
    pins = tuple(f"up.weight: {axis}=S({k})" for k, axis in enumerate(("a", "b")) if axis in mesh and mesh != "a=1")
    return autoddl.plan(Classifier().double(), cluster_of(mesh), data()[:ROWS], mesh=mesh, pins=pins)


def whole(value: Any) -> Tensor:
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert isinstance(found, Tensor)
    return found.detach()


@contextmanager
def launched() -> Iterator[None]:
    """The environment that torchrun gives this rank; accelerate sees it, and forgets it afterwards."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update(words)
    try:
        with alone():
            yield
    finally:
        for name in words:
            os.environ.pop(name, None)


@contextmanager
def alone() -> Iterator[None]:
    """A state of accelerate of its own."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()

    forget()
    try:
        yield
    finally:
        forget()
