"""The machine of a plan as its programs run on it: a cluster, a software profile and a machine's constants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from autoddl.cli.tables import plan_tables
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, load_cluster, show_seconds
from autoddl.cost_models.profile import SHIPPED, Profile, load_profile
from autoddl.cost_models.software import compiled_like, run_by, software_named

if TYPE_CHECKING:
    from autoddl.api import Comparison
    from autoddl.explain.run_seconds import StepAsRun

__all__ = ["Machine", "as_run", "with_ties"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, and the program and constants with which it runs plans."""

    cluster: Cluster
    """The machine, whose programs are those of `software`, with the constants of `profile`."""
    software: str | None
    """Name of the software profile; None where none was asked for."""
    profile: Profile
    """The constants of the machine."""
    bare: Cluster
    """The machine as its file has it."""

    @classmethod
    def read(cls, path: Path, compiled: bool, software: str | None, profile: Path | None) -> "Machine":
        """The machine that the options of a verb name. The software of a profile holds where none other is named."""
        from autoddl.operators.fusion import as_compiled

        known = SHIPPED if profile is None else load_profile(profile)
        if software is not None and compiled:
            other = compiled_like(software)
            wanted = f", or take --software {other}" if other else ": its kernels are fused"
            raise InputError(f"--software {software} says what is compiled, and --compiled does too: drop --compiled"
                             f"{wanted}")
        name = software if software is not None or compiled else known.software
        bare = load_cluster(path)
        cluster = bare if name is None else run_by(bare, software_named(name))
        return cls(known.on(as_compiled(cluster) if compiled else cluster), name, known, bare)

    def said_by(self, plan: Plan) -> Plan:
        """Returns the plan, which says for which program and with which constants it was made, if any."""
        told: dict[str, Any] = {} if self.software is None else {"software": self.software}
        if self.profile != SHIPPED:
            told["profile"] = self.profile.to_json()
        if told or self.cluster != self.bare:
            told["bare"] = self.bare.to_yaml()
        return replace(plan, source={**plan.source, **told})

    def steps_of(self, found: "tuple[Comparison, ...]") -> "tuple[StepAsRun | None, ...]":
        """Returns the step of every plan of a comparison as the program runs it; None where there is no plan."""
        from autoddl.explain.run_seconds import step_as_run

        return tuple(None if row.plan is None else step_as_run(self.said_by(row.plan)) for row in found)


def with_ties(found: "tuple[Comparison, ...]", ran: "Sequence[StepAsRun | None]") -> "tuple[Comparison, ...]":
    """Returns a comparison, which says whose step as it `ran` is too near the first to be told apart, or is shorter."""
    first, name = ran[0], found[0].name
    if first is None:
        return found
    tie = f"a tie with {name}"
    shorter = f"shorter than {name} as it runs: the search compares sums of seconds"
    words = ["" if one is None else tie if one.ties(first) else shorter * (one.seconds < first.seconds)
             for one in ran[1:]]
    return (found[0], *(replace(row, detail="; ".join(filter(None, (row.detail, word))))
                        for row, word in zip(found[1:], words, strict=True)))


def as_run(plan: Plan) -> tuple[RenderableType, dict[str, Any]]:
    """The table and the figures of a plan; of one for a software profile, with its step as that program runs it."""
    from autoddl.explain.run_seconds import step_as_run

    ran = step_as_run(plan)
    table, data = plan_tables.plan_table(plan, ran), plan_tables.summary(plan, ran)
    if ran is None:
        return table, data
    low, median, high = ran.interval.of(ran.seconds)
    whose = f"the {ran.runs} runs of the profile" if ran.runs else "published runs of this kind"
    what = "sum" if plan.pipeline is None else "time line"
    other = compiled_like(ran.software)
    eager = f", operator by operator (--software {other} prices torch.compile)" if other else ""
    line = (f"as run by {ran.software}{eager}: {show_seconds(ran.seconds)} is what a step takes, with what overlaps "
            f"and what the program adds. {show_seconds(plan.predicted.seconds)} below is the {what} that the search "
            f"compares. By {whose}, half would take more than {show_seconds(median)}, and 8 of 10 between "
            f"{show_seconds(low)} and {show_seconds(high)}")
    return Group(line, "", table), data | ran.to_json()
