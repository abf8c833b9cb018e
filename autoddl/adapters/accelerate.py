"""Runs a plan in a loop of accelerate (Gugger et al., huggingface.co/docs/accelerate).

    from autoddl.adapters.accelerate import Accelerator          in place of accelerate's own
    accelerator = Accelerator(plan=plan)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of the loop stays. The plan says what every rank does with a batch. So a loader yields the global batch on
every rank, as with `split_batches=True`, and a scheduler steps once per step. What a call returns is whole on every
rank, so gathering it, as for metrics, returns it as it is. Precision is that of the plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from autoddl.adapters.module import parallel_of, planned_module
from autoddl.adapters.variants import with_variants
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["Accelerator", "move_optimizer"]

FOLDER = "autoddl"
"""The folder of model and optimizer inside that of a saved state."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An accelerator that trains one model as `plan` says: a Plan, or the path of one.

        planned    the model by which `prepare` was called last, None before

    Other arguments are accelerate's. Raises InputError for mixed precision in float16, which plans do not have.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, plan: Plan | str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mixed_precision == "fp16":
            raise InputError("mixed_precision='fp16' scales losses for float16, which no plan computes in: leave it "
                             "out, and plan with precision='bf16-mixed'")
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.planned: ParallelModel | None = None

    @property
    def split_batches(self) -> bool:
        """Always true: a loader yields the global batch."""
        return True

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares what is given; the module among it runs the plan from now on, and optimizers update its pieces."""
        modules = [one for one in args if isinstance(one, nn.Module) and parallel_of(one) is None]
        if len(modules) > 1 or (modules and self.planned is not None):
            raise InputError(f"one plan runs one module, and prepare was given {len(modules)}"
                             f"{' after another' * (self.planned is not None)}: put them into one, which returns the "
                             "loss, or use an accelerator for each")
        for module in modules:
            before = dict(module.named_parameters())
            self.planned = with_variants(module, self.plan, device=self.device)
            planned_module(self.planned)
            for one in args:
                if isinstance(one, torch.optim.Optimizer):
                    move_optimizer(one, before, module)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
                      ) -> nn.Module:
        """Keeps a module that runs its plan as it is: it is on its device, and needs no wrapper."""
        if parallel_of(model) is None:
            found: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return found
        if not any(model is one for one in self._models):
            self._models.append(model)
        return model

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
                            ) -> Any:
        """Prepares a loader that yields the global batch on every rank, in one order."""
        made = prepare_data_loader(
            data_loader, self.device, num_processes=1, process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=["torch"], use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed, non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader)
        self._dataloaders.append(made)
        return made

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the gradients of the whole model by their norm; returns the norm before, on every rank."""
        if self.planned is None or norm_type != 2:
            found: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return found
        return self.planned.clip_grad_norm_(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Returns its argument, which is whole on every rank."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns its argument, which is whole on every rank; a tensor without more rows than the last batch has."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            return input_data
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns its argument, which is that of all ranks already, times `scale`."""
        return tensor if scale == 1 else tensor * scale

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Returns its argument, which is as long on every rank."""
        return tensor

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Saves model and optimizer as a checkpoint of any plan, and the rest as accelerate does."""
        with self._apart() as optimizer:
            place = super().save_state(output_dir, *args, **kwargs)
            if self.planned is not None:
                checkpoint.save(self.planned, optimizer, Path(place, FOLDER))
        return place

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_state` saved, under this plan or another. Raises InputError without a folder."""
        if input_dir is None and self.planned is not None:
            folders = sorted(Path(self.project_dir or ".", "checkpoints").glob("checkpoint_*"),
                             key=lambda one: int(one.name.rpartition("_")[2]))
            if not folders:
                raise InputError("load_state has no folder, and the project has no checkpoints: give input_dir")
            input_dir = str(folders[-1])
        with self._apart() as optimizer:
            super().load_state(input_dir, *args, **kwargs)
            if self.planned is not None:
                checkpoint.load(self.planned, optimizer, Path(input_dir, FOLDER))

    @contextmanager
    def _apart(self) -> Iterator[torch.optim.Optimizer | None]:
        """Hides model and optimizer from accelerate's own saving; yields the optimizer."""
        models, optimizers = self._models, self._optimizers
        if self.planned is not None and len(optimizers) > 1:
            raise InputError(f"{len(optimizers)} optimizers were prepared, and a checkpoint holds one: make them "
                             "groups of one optimizer")
        if self.planned is not None:
            self._models, self._optimizers = [], []
        try:
            yield optimizers[0].optimizer if optimizers else None
        finally:
            self._models, self._optimizers = models, optimizers


def move_optimizer(optimizer: torch.optim.Optimizer, before: dict[str, nn.Parameter], module: nn.Module) -> None:
    """Lets an optimizer made for the parameters `before` update those that `module` has now.

    Parameters of other stages leave it. Raises InputError for an optimizer that has stepped.
    """
    if optimizer.state:
        raise InputError("the optimizer has stepped before its model was planned: make it anew, or prepare it first")
    names = {id(p): name for name, p in before.items()}
    after = dict(module.named_parameters())
    for group in optimizer.param_groups:
        moved = [after.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"] = [p for p in moved if p is not None]
