"""Plans a save once for all that follow, while no rank's state has changed but in values.

    the state has the tensors of the last save  ->  the rank says so, in place of its plan
    every rank says so                          ->  all write by their plans from before; the writer has the metadata
    one does not                                ->  the first rank plans anew for all, with the plans it knows

Plans that torch.distributed.checkpoint keeps are those of a class of planners. Here each planner has its own, so two
that save different states do not disturb each other.
"""

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex

from autoddl.runtime.checkpoints.staging import StagedPiece

__all__ = ["RepeatedPlanner"]


class RepeatedPlanner(DefaultSavePlanner):
    """Plans as DefaultSavePlanner. States with the same tensors, the objects themselves, have the same plan."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._planned: dict[str, Any] = {}
        self._final: SavePlan | None = None
        self._locals: list[SavePlan] = []

    def create_local_plan(self) -> SavePlan:
        """The values that this rank could write; not `usable` where it has the plan from before."""
        mine = {name: value if isinstance(value, Tensor | StagedPiece) else None
                for name, value in self.state_dict.items()}
        if self._final is not None and _same(mine, self._planned):
            return SavePlan([], usable=False)
        self._planned, self._final = mine, None
        plan: SavePlan = super().create_local_plan()
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Says what each rank writes, each value once, and the metadata; on the first rank. Nothing if all is known."""
        if self._locals and not any(plan.usable for plan in all_plans):
            return all_plans, Metadata({})
        known = self._locals or all_plans
        self._locals = [new if new.usable else old for new, old in zip(all_plans, known, strict=True)]
        if not all(plan.usable for plan in self._locals):
            raise ValueError("a rank goes on with a plan of the save that the first rank has lost")
        plans, metadata = super().create_global_plan(self._locals)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns what this rank writes."""
        if new_plan.usable:
            self._final = new_plan
        assert self._final is not None, "the first rank goes on with a plan that this one has lost"
        return self._final

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value to write."""
        value = self.state_dict[index.fqn]
        return value.copy if isinstance(value, StagedPiece) else super().lookup_object(index)


def _same(mine: dict[str, Any], planned: dict[str, Any]) -> bool:
    """Whether all values are the very same objects, by name."""
    return mine.keys() == planned.keys() and all(value is planned[name] for name, value in mine.items())
