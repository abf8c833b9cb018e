"""Tracks the bytes of a rank over a step: what torch counts, to be compared with what is predicted."""

from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["tracked_peak"]


def tracked_peak(parallel: ParallelModel, model: nn.Module, batch: Any) -> int:
    """Bytes at the peak of the second step: the first makes the optimizer's state."""
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            parallel.step(batch)
            optimizer.step()
            optimizer.zero_grad()
    return max(int(found["Total"]) for found in tracker.get_tracker_snapshot("peak").values())
