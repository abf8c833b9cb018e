"""Tells all ranks small values, as JSON in tensors: nothing that a peer sends is unpickled.

    gather_values(value)    the values of all ranks, in order, on every rank
    first_value(value)      that of rank 0, on every rank
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["first_value", "gather_values"]


def gather_values(value: Any) -> list[Any]:
    """The values of all ranks; each is what JSON can write. RuntimeError where a peer is gone."""
    text = json.dumps(value).encode()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    sizes = _gathered(torch.tensor([len(text)], device=device))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[:len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return [json.loads(bytes(row[:int(size)].tolist())) for row, size in zip(_gathered(mine), sizes, strict=True)]


def first_value(value: Any) -> Any:
    """The value of rank 0."""
    return gather_values(value)[0]


def _gathered(mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found
