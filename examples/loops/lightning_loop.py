"""A Trainer of Lightning with a plan. Run: torchrun --nproc-per-node 4 examples/loops/lightning_loop.py

Without a plan, three lines are others: the import of PlannedStrategy, the one that plans, and the strategy.
"""

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autoddl
from autoddl.adapters.lightning import PlannedStrategy

CLUSTER = Path(__file__).parents[1] / "clusters" / "laptop.yaml"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Lit(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.model(*batch)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        found = self.model(*batch)
        self.log("accuracy", (found["logits"].argmax(-1) == batch[1]).float().mean())

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}  accuracy {float(self.trainer.callback_metrics['accuracy']):.3f}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


torch.manual_seed(0)
x = torch.randn(1000, 64)
data = TensorDataset(x, x[:, :10].argmax(1))
module = Lit()
plan = autoddl.plan(module.model, CLUSTER, data[:64])
trainer = lightning.Trainer(strategy=PlannedStrategy(plan), accelerator="cpu", devices=4, max_epochs=3,
                            accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False,
                            default_root_dir="/tmp/autoddl-lightning", enable_progress_bar=False)
trainer.fit(module, DataLoader(data, 64, shuffle=True), DataLoader(data, 64))
