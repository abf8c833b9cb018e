"""Lightning's Trainer with a plan does what it does without: accumulation, clipping, schedulers, logs, checkpoints."""

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import Classifier, alone, launched, loader, planned
from ranks import on_ranks

from autoddl.adapters.lightning import PlannedStrategy
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Notes every loss and every metric."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.found = Classifier().double(), list[float]()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)["loss"]
        self.found.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        found = self.model(*batch)
        self.log_dict({"val": found["loss"], "right": (found["logits"].argmax(-1) == batch[1]).double().mean()})

    def on_validation_epoch_end(self) -> None:
        self.found += [float(value) for _, value in sorted(self.trainer.callback_metrics.items())]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def trained(folder: str, checkpoint: str | None = None, **options: Any) -> list[float]:
    module = Lit()
    torch.manual_seed(5)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")], **options)
    trainer.fit(module, loader(shuffle=True), loader(), ckpt_path=checkpoint)
    trainer.validate(module, loader(), verbose=False)
    return module.found


def compared(plan: Plan, folder: str) -> list[list[float]]:
    """Without a plan and with it, each trained, and resumed after the first epoch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    with alone():
        found = [trained(f"{folder}/plain{rank}", devices=1)]
        found.append(trained(f"{folder}/plain{rank}", f"{folder}/plain{rank}/epoch=0.ckpt", devices=1))
    with launched():
        found.append(trained(f"{folder}/planned", devices=world, strategy=PlannedStrategy(plan)))
        found.append(trained(f"{folder}/again", f"{folder}/planned/epoch=0.ckpt", devices=world,
                             strategy=PlannedStrategy(plan)))
    return found


@pytest.mark.ranks
def test_lightning_trains_evaluates_and_resumes_as_without_a_plan(tmp_path: Path) -> None:
    for plain, resumed, with_plan, again in on_ranks(2, compared, planned("a=2"), str(tmp_path)):
        assert with_plan == pytest.approx(plain, rel=1e-9) and again == pytest.approx(resumed, rel=1e-9)


def missing(plan: Plan) -> str:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with launched(), pytest.raises(InputError) as error:
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, devices=2, enable_progress_bar=False,
                                    enable_checkpointing=False, strategy=PlannedStrategy(plan, module="network"))
        trainer.fit(Lit(), loader(shuffle=True))
    return str(error.value)


@pytest.mark.ranks
def test_a_module_that_is_not_there_is_named() -> None:
    assert "no module 'network'" in on_ranks(2, missing, planned("a=2"))[0]
