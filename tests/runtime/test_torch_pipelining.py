"""A plan with stages trains as torch.distributed.pipelining does with the same schedule: same losses, step by step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from staged_plans import cuts_before, staged_plan
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample
from autoddl.core.pipeline_schedules import chunks_of
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize

BLOCKS, WIDTH, ROWS, STEPS = 8, 12, 3, 4
THEIRS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved:2": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
          "dualpipe-v": "DualPipeV"}


class Blocks(nn.Module):
    """Products with a tanh each, and the mean of the squares of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class Part(nn.Module):
    """The blocks of one stage, for torch."""

    def __init__(self, whole: Blocks, stage: int, stages: int) -> None:
        super().__init__()
        each = BLOCKS // stages
        self.blocks = nn.ModuleList(list(whole.blocks)[stage * each:(stage + 1) * each])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def made(microbatches: int) -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks().double(), torch.randn(microbatches * ROWS, WIDTH, dtype=torch.float64)


@shared
def captured(microbatches: int) -> Captured:
    module, batch = made(microbatches)
    return capture(module, Sample((batch[:ROWS],), {}))


def ours(plan: Plan) -> list[float]:
    """The losses of some steps of a plan, on every rank."""
    module, batch = made(plan.microbatches)
    parallel = parallelize(module, plan, captured=captured(plan.microbatches))
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(parallel.step(batch)))
        optimizer.step()
    return losses


def theirs(name: str, microbatches: int) -> list[float]:
    """The losses of torch's own runtime, on the rank that has the last stage; none on others."""
    (module, batch), rank, parts = made(microbatches), dist.get_rank(), dist.get_world_size()
    stages = parts * chunks_of(name)
    own = [rank] if stages == parts else [rank, rank + parts if name == "interleaved:2" else stages - 1 - rank]
    row = torch.empty(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    here = [Part(module, s, stages) for s in own]
    placed = [PipelineStage(part, s, stages, torch.device("cpu"), input_args=(row,), output_args=(row,))
              for part, s in zip(here, own, strict=True)]
    schedule: Any = get_schedule_class(THEIRS[name])(
        placed if len(own) > 1 else placed[0], microbatches, loss_fn=lambda x, _: x.square().mean())
    optimizer, found = torch.optim.SGD([p for part in here for p in part.parameters()], lr=0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = {"target": batch, "losses": losses} if stages - 1 in own else {}
        schedule.step(*((batch,) if 0 in own else ()), **last)
        optimizer.step()
        found += [float(torch.stack(losses).mean())] if losses else []
    return found


@pytest.mark.ranks
@parametrize_or_slow("name,parts,microbatches", [("zb-v", 2, 4)], [
    ("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved:2", 2, 4), ("dualpipe-v", 2, 4), ("gpipe", 4, 4), ("1f1b", 4, 8),
    ("interleaved:2", 4, 8), ("zb-v", 4, 8), ("dualpipe-v", 4, 8)])
def test_losses_are_those_of_torch_s_own_pipelines(name: str, parts: int, microbatches: int) -> None:
    stages = parts * chunks_of(name)
    cuts = cuts_before(captured(microbatches).graph, [f"blocks.{BLOCKS // stages * s}" for s in range(1, stages)])
    mine = on_ranks(parts, ours, staged_plan(captured(microbatches), cuts, name, "one=1", microbatches))
    [expected] = [losses for losses in on_ranks(parts, theirs, name, microbatches) if losses]
    assert all(losses == pytest.approx(expected, rel=1e-12) for losses in mine)
    assert expected[-1] < expected[0]
