"""A training script as anyone has it, and two calls. Run: torchrun --nproc-per-node 4 examples/train.py"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = Path(__file__).parent / "clusters" / "laptop.yaml"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
    return x, x[:, :10].argmax(1)


torch.manual_seed(0)
module = Classifier()
plan = autoddl.plan(module, CLUSTER, batch(0))  # the first call
model = autoddl.parallelize(module, plan)  # the second
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(50):
    loss = model.step(batch(step))
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9 and torch.distributed.get_rank() == 0:
        print(f"step {step + 1:3}  loss {loss:.4f}", flush=True)
torch.distributed.destroy_process_group()
