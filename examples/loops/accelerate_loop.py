"""A loop of accelerate with a plan. Run: torchrun --nproc-per-node 4 examples/loops/accelerate_loop.py

Without a plan, three lines are others: the import of Accelerator, the one that plans, and the one that makes it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autoddl
from autoddl.adapters.accelerate import Accelerator

CLUSTER = Path(__file__).parents[1] / "clusters" / "laptop.yaml"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
x = torch.randn(1000, 64)
data = TensorDataset(x, x[:, :10].argmax(1))
model = Classifier()
plan = autoddl.plan(model, CLUSTER, data[:64])
accelerator = Accelerator(plan=plan, cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, 64, shuffle=True), DataLoader(data, 64), scheduler)
for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = model(inputs, labels)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for inputs, labels in held_out:
        with torch.no_grad():
            best = model(inputs, labels)["logits"].argmax(-1)
        found, wanted = accelerator.gather_for_metrics((best, labels))
        right += int((found == wanted).sum())
    accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {right / len(data):.3f}")
    accelerator.save_state("/tmp/autoddl-accelerate")
accelerator.end_training()
