"""Does a long run drift, leak or leave something behind? sudo python examples/benchmarks/soak.py [steps]

A small GPT on Python's own standard library (`demo`), on rehearsal-2x2-200 with all its links shaped, 500 steps, with a
checkpoint every 50; then the same in one process of plain PyTorch. It passes if

    loss       differs by at most 1e-4, relatively, at every step
    memory     of every rank, at the last checkpoint, is less than 2 % above that at the second
    leftovers  there is no process and no namespace of this run when it is over
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from demo import corpus
from gpt import gpt

import autoddl
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch, leave
from autoddl.launch.places import network_places
from autoddl.launch.shaped_network import shape_links
from autoddl.runtime.checkpoints import checkpoint

CLUSTER = Path(__file__).parent.parent / "clusters" / "rehearsal-2x2-200.yaml"
EVERY, BATCH, CONTEXT = 50, 16, 32
LOSS, GROWTH = 1e-4, 0.02
PAGE = os.sysconf("SC_PAGE_SIZE")

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = gpt(layers=2, width=64, heads=4, context=CONTEXT, batch=BATCH)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return made


def batch(text: Tensor, step: int) -> Batch:
    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(steps: int, loss_of: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer,
          after: Callable[[int], None] = lambda step: None) -> list[float]:
    """The losses; `after` is called after every step."""
    text, losses = corpus(), []
    for step in range(steps):
        losses.append(float(loss_of(batch(text, step))))
        optimizer.step()
        optimizer.zero_grad()
        after(step + 1)
    return losses


def one_rank(folder: Path, steps: int) -> None:
    """What each process runs: losses and resident bytes at every checkpoint."""
    parallel = autoddl.parallelize(model(), autoddl.load_plan(folder / "plan.json"))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    resident: list[int] = []

    def after(step: int) -> None:
        if step % EVERY == 0:
            checkpoint.save(parallel, optimizer, folder / "checkpoint")
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)

    losses = train(steps, parallel.step, optimizer, after)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"losses": losses, "resident": resident}))
    leave(0)


def alone(steps: int) -> list[float]:
    """The losses of plain PyTorch."""
    module = model()

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = module(*batch)
        torch.autograd.backward(loss)
        return loss.detach()

    return train(steps, loss_of, torch.optim.AdamW(module.parameters(), lr=1e-3))


def left_behind(folder: str, namespaces: set[str]) -> list[str]:
    """Namespaces that were not there before, and processes that this run started."""
    spaces = Path("/run/netns")
    found = sorted({path.name for path in spaces.iterdir()} - namespaces) if spaces.is_dir() else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder in path.read_text() and path.parent.name != str(os.getpid()):
                found.append(f"process {path.parent.name}")
        except OSError:
            continue
    return [name for name in found if name.startswith("process") or f"-{os.getpid()}-" in name]


def main(steps: int = 500) -> int:
    if steps < 2 * EVERY:
        raise SystemExit(f"{steps} steps have no second checkpoint, whose memory the last is compared with: take "
                         f"{2 * EVERY} or more")
    before = {path.name for path in Path("/run/netns").iterdir()} if Path("/run/netns").is_dir() else set()
    plan, cluster = autoddl.plan(model(), CLUSTER, batch(corpus(), 0), name="gpt"), load_cluster(CLUSTER)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="autoddl-soak-") as folder:
        plan.save(Path(folder, "plan.json"))
        with shape_links(cluster) as built:
            launch(cluster.size, [sys.executable, __file__, folder, str(steps)], places=network_places(built))
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(cluster.size)]
    took, single = time.time() - began, alone(steps)
    worst = max(abs(a - b) / abs(b) for a, b in zip(ranks[0]["losses"], single, strict=True))
    growth = max(rank["resident"][-1] / rank["resident"][1] - 1 for rank in ranks)
    left = left_behind(folder, before)
    print(f"{steps} steps on {cluster.name} in {took:.0f} s, mesh {plan.mesh}, loss to {single[-1]:.3f}\n"
          f"loss      differs by {worst:.1e} at most (allowed {LOSS:.0e})\n"
          f"memory    grows by {growth:+.2%} at most (allowed {GROWTH:.0%}), "
          f"{max(rank['resident'][-1] for rank in ranks) / 1e6:.0f} MB a rank\n"
          f"leftovers {', '.join(left) or 'none'}")
    return 0 if worst <= LOSS and growth < GROWTH and not left else 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        one_rank(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(*map(int, sys.argv[1:])))
