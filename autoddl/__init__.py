"""AutoDDL: a PyTorch model and a cluster file in, the fastest plan that provably runs out.

    plan = autoddl.plan(model, "cluster.yaml")
    model = autoddl.parallelize(model, plan)
    loss = model.step(batch)

Names resolve on first use, so that reading a plan does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoddl.core.errors import AutoDDLError, CaptureError, Infeasible, InputError, MachineError, MismatchError

if TYPE_CHECKING:
    from autoddl.adapters.module import WithLoss, planned_module
    from autoddl.adapters.rank_loader import RankLoader
    from autoddl.adapters.safetensors import load_safetensors, save_safetensors
    from autoddl.adapters.variants import parallelize
    from autoddl.api import compare, plan
    from autoddl.capture.own_rules import rule
    from autoddl.core.plan import Plan, load_plan
    from autoddl.runtime.parallelize import ParallelModel

__all__ = ["AutoDDLError", "CaptureError", "Infeasible", "InputError", "MachineError", "MismatchError", "ParallelModel",
           "Plan", "RankLoader", "WithLoss", "compare", "load_plan", "load_safetensors", "parallelize", "plan",
           "planned_module", "rule", "save_safetensors"]

__version__ = "0.1.0"

_HOMES = {"plan": "autoddl.api", "compare": "autoddl.api", "Plan": "autoddl.core.plan",
          "load_plan": "autoddl.core.plan", "parallelize": "autoddl.adapters.variants",
          "ParallelModel": "autoddl.runtime.parallelize", "load_safetensors": "autoddl.adapters.safetensors",
          "save_safetensors": "autoddl.adapters.safetensors", "rule": "autoddl.capture.own_rules",
          "RankLoader": "autoddl.adapters.rank_loader",
          "WithLoss": "autoddl.adapters.module", "planned_module": "autoddl.adapters.module"}

_MODULES = {"checkpoint": "autoddl.runtime.checkpoints.checkpoint", "recovery": "autoddl.runtime.checkpoints"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'autoddl' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
