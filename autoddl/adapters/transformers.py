"""Runs a plan in the Trainer of transformers (Wolf et al., 2020, "Transformers").

    from autoddl.adapters.transformers import Trainer            in place of transformers' own
    trainer = Trainer(model=model, args=args, train_dataset=..., plan=plan)

The rest of the script stays: clipping, schedulers, accumulation, evaluation, callbacks, logs, checkpoints, resuming. A
batch has `per_device_train_batch_size` rows for each rank, as always, and the plan is for all of them together. With
accumulation every batch counts by its tokens, as in the plain Trainer.

A checkpoint has the weights as safetensors, and weights and optimizer as a checkpoint of any plan under `autoddl`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from autoddl.adapters.accelerate import FOLDER, Accelerator
from autoddl.adapters.module import planned_module
from autoddl.adapters.safetensors import load_safetensors, save_safetensors
from autoddl.adapters.variants import with_variants
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.runtime.checkpoints import checkpoint

__all__ = ["Trainer"]


class Trainer(transformers.Trainer):
    """A Trainer whose model runs `plan`: a Plan, or the path of one. Other arguments are those of transformers.

    Raises InputError without a model, and for losses that are computed outside of it.
    """

    def __init__(self, model: nn.Module, args: transformers.TrainingArguments, *others: Any, plan: Plan | str | Path,
                 **kwargs: Any) -> None:
        if args.label_smoothing_factor or kwargs.get("compute_loss_func") is not None:
            raise InputError("label_smoothing_factor and compute_loss_func compute a loss outside of the model, and a "
                             "plan has that of the model: compute it in the model's forward")
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.planned = with_variants(model, self.plan, device=args.device)
        super().__init__(planned_module(self.planned), args, *others, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._words: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._words

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(plan=self.plan, **self._words)
        self.accelerator.planned = self.planned
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *others: Any, **kwargs: Any) -> Any:
        return super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *others, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates with the rows of all ranks as those of a batch, by which losses of batches are weighed."""
        before, self.args = self.args, copy.copy(self.args)
        self.args.per_device_eval_batch_size *= self.args.world_size
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.args = before

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Tensor | int | None = None) -> Any:
        """The mean loss of the batch, times its tokens over `num_items_in_batch`, as the plain Trainer has it."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if num_items_in_batch is not None:
            labels = inputs["labels"][..., 1:] if self._shifts else inputs["labels"]
            loss = loss * (labels.ne(-100).sum() / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    @property
    def _shifts(self) -> bool:
        """Whether the model's own loss leaves out the first label of every row."""
        return getattr(self.model, "loss_function", None) is ForCausalLMLoss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.planned.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.planned.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights as safetensors, with what `from_pretrained` needs; every rank calls it."""
        folder = Path(str(output_dir or self.args.output_dir))
        save_safetensors(self.planned, folder)
        if self.args.should_save:
            for part in (getattr(self.model, "config", None), getattr(self.model, "generation_config", None),
                         self.processing_class):
                if part is not None:
                    part.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(self.planned, self._plain_optimizer, Path(output_dir, FOLDER))
        assert self.lr_scheduler is not None
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None and Path(checkpoint_folder, FOLDER).exists():
            assert self.lr_scheduler is not None
            checkpoint.load(self.planned, self._plain_optimizer, Path(checkpoint_folder, FOLDER))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint_folder, SCHEDULER_NAME), weights_only=True))

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        found: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(found, torch.optim.Optimizer)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_safetensors(self.planned, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_safetensors(self.planned, str(self.state.best_model_checkpoint))
