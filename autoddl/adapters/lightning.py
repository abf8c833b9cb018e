"""Runs a plan under the Trainer of Lightning (lightning.ai/docs/pytorch).

    from autoddl.adapters.lightning import PlannedStrategy
    trainer = Trainer(strategy=PlannedStrategy(plan), accelerator="cpu", devices=4, ...)

The plan is that of a module inside the LightningModule, by default its attribute `model`, whose forward returns the
loss. `training_step` calls it and returns the loss, or a sum with it. Loaders yield the global batch on every rank, in
one order. So what is logged is that of the whole batch, and needs no `sync_dist`.

A checkpoint is a folder: model and optimizer as a checkpoint of any plan under `autoddl`, the rest in `lightning.ckpt`.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from autoddl.adapters.accelerate import FOLDER
from autoddl.adapters.module import planned_module
from autoddl.adapters.variants import with_variants
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.collectives.told_values import first_value, gather_values
from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["PlannedStrategy"]

REST = "lightning.ckpt"


class PlannedStrategy(ParallelStrategy):  # type: ignore[misc]
    """Runs `plan`, a Plan or the path of one, of the module called `module` in the LightningModule.

        planned    its model, once the Trainer has set it up
        seconds    how long a collective may take
    """

    def __init__(self, plan: Plan | str | Path, module: str = "model", seconds: float = 600.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.planned: ParallelModel | None = None
        self.num_nodes = 1
        self._name, self._seconds = module, seconds

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The processes of this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Loaders are not split: each rank reads the global batch."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read into the pieces, so once these are there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer is read together with the model."""
        return False

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Joins the processes."""
        super().setup_environment()
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank
        backend = "nccl" if self.root_device.type == "cuda" else "gloo"
        _init_dist_connection(environment, backend, timeout=timedelta(seconds=self._seconds))

    def setup(self, trainer: Any) -> None:
        """Makes the module run its plan, then the optimizers. Raises InputError where it is not there."""
        self.accelerator.setup(trainer)
        if self.planned is None:
            module = getattr(self.lightning_module, self._name, None)
            if not isinstance(module, torch.nn.Module):
                raise InputError(f"the LightningModule has no module {self._name!r}: give PlannedStrategy module=, the "
                                 "name of the one that returns the loss")
            self.planned = with_variants(module, self.plan, device=self.root_device, timeout=self._seconds)
            planned_module(self.planned)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip
        if dist.is_initialized():
            torch.set_rng_state(torch.tensor(first_value(torch.get_rng_state().tolist()), dtype=torch.uint8))

    def model_to_device(self) -> None:
        """Moves what is beside the planned module to the device."""
        self.model.to(self.root_device)

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        assert self.planned is not None
        self.planned.clip_grad_norm_(clip_val)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            gather_values(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of rank `src`, which JSON can write, on every rank."""
        return gather_values(obj)[src] if dist.is_initialized() else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns its argument: values are those of the whole batch on every rank."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any."""
        every = gather_values(bool(decision)) if dist.is_initialized() else [bool(decision)]
        return False not in every if all else True in every

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns its argument as the only one: it is that of the whole batch."""
        return tensor[None]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns what the LightningModule has beside the planned module."""
        return {name: value for name, value in self.lightning_module.state_dict().items()
                if not name.startswith(f"{self._name}.")}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Loads what the LightningModule has beside the planned module, which `load_checkpoint` has loaded."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing: `save_checkpoint` saves the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a folder; every rank calls it."""
        save(self._model_of_plan, self._optimizer, Path(filepath), checkpoint, self.is_global_zero)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder into the planned module and the optimizer; returns the rest."""
        folder = Path(checkpoint_path)
        if not (folder / REST).is_file():
            raise InputError(f"{folder} is no checkpoint of PlannedStrategy: it has no {REST}")
        checkpoint.load(self._model_of_plan, self._optimizer, folder / FOLDER)
        rest: dict[str, Any] = torch.load(folder / REST, weights_only=True if weights_only is None else weights_only)
        return rest

    @property
    def _model_of_plan(self) -> ParallelModel:
        assert self.planned is not None, "the Trainer sets the strategy up before checkpoints"
        return self.planned

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        if len(self.optimizers) > 1:
            raise InputError(f"configure_optimizers made {len(self.optimizers)} optimizers, and a checkpoint holds "
                             "one: make them groups of one optimizer")
        return self.optimizers[0] if self.optimizers else None


def save(model: ParallelModel, optimizer: torch.optim.Optimizer | None, folder: Path, rest: dict[str, Any], first: bool
         ) -> None:
    """Saves model and optimizer under `autoddl` of a folder, and on the `first` rank the rest beside it."""
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(model, optimizer, folder / FOLDER)
    if first:
        torch.save(rest, folder / REST)
