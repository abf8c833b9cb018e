"""Training that goes on with fewer ranks: which plan is run when ranks are lost.

    plans made ahead       files that the user names, or PLAN.spare-RANKS.json beside the plan (`plan --spares`)
    plans made then        with `auto`, the plan's own question asked again for the devices that are left (`spares`)

A rank is lost when it dies without a word, or hangs while the others wait for it in vain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddl.core.errors import AutoDDLError, InputError, MismatchError
from autoddl.core.plan import Plan, load_plan

__all__ = ["AUTO", "Elastic", "PlanFile", "read_elastic", "spare_path"]

AUTO = "auto"
"""The word for plans made ahead beside the plan, or made when ranks are lost."""


@dataclass(frozen=True)
class PlanFile:
    """A plan and the file that ranks read it from."""

    path: Path
    plan: Plan


@dataclass(frozen=True)
class Elastic:
    """The plans that may be run in place of the first one, which is `plans[0]`; with `makes` more are made."""

    plans: tuple[PlanFile, ...]
    makes: bool = False

    def of_size(self, ranks: int) -> PlanFile | None:
        """The plan for exactly `ranks`, the fastest of several; None without one."""
        return _fastest([one for one in self.plans if one.plan.mesh.size == ranks])

    def for_at_most(self, ranks: int, folder: Path, progress: Callable[[str, int, int], None]) -> PlanFile | None:
        """The fastest plan for at most `ranks`; where none was made ahead and one may be made, it lies in `folder`."""
        found = _fastest([one for one in self.plans if one.plan.mesh.size <= ranks])
        if found is not None or not self.makes or ranks < 1:
            return found
        from autoddl.explain.spares import plan_for

        try:
            plan = plan_for(self.plans[0].plan, ranks, progress)
        except AutoDDLError:
            return None
        path = folder / f"spare-{plan.mesh.size}.json"
        plan.save(path)
        return PlanFile(path, plan)


def _fastest(plans: Sequence[PlanFile]) -> PlanFile | None:
    return min(plans, key=lambda one: one.plan.predicted.seconds, default=None)


def spare_path(plan: Path, ranks: int) -> Path:
    """Where the plan for `ranks` lies that was made ahead with `plan`."""
    return plan.with_suffix(f".spare-{ranks}.json")


def read_elastic(path: Path, plan: Plan, words: Sequence[str]) -> Elastic:
    """The plans that `words` name: files, or `auto`. Raises InputError for a file that is none, MismatchError for a
    plan of another model."""
    auto = AUTO in words
    files = [Path(word) for word in words if word != AUTO]
    if auto:
        files += sorted(path.parent.glob(spare_path(Path(path.name), 0).name.replace("-0.", "-*.")))
    found = [PlanFile(one.resolve(), load_plan(one)) for one in files]
    for one in found:
        if one.plan.source.get("graph") != plan.source.get("graph") and \
                one.plan.fingerprints.get("model") != plan.fingerprints.get("model"):
            raise MismatchError(f"{one.path} is a plan of another model than {path}: give plans of the same model and "
                                "batch, or --elastic auto")
        if one.plan.mesh.size > plan.mesh.size:
            raise InputError(f"{one.path} is for {one.plan.mesh.size} ranks, more than the {plan.mesh.size} of {path}: "
                             "start from the larger plan")
    return Elastic((PlanFile(path.resolve(), plan), *found), auto)
