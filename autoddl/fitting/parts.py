"""Finds the candidates of a choice and the experiments on parts of the cluster that would narrow it.

    candidates     the plans of a comparison that differ: the found plan and the best of every named strategy
    experiments    on one device, two, four ... and one unit of each level: the best plan there; and every candidate on
                   the whole cluster

The batch is that of the sample on every part. A part on which no plan fits has no experiment.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autoddl.api import Comparison, compare, plan
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.cost_models.intervals import EIGHTY
from autoddl.cost_models.profile import Profile
from autoddl.explain.run_seconds import sureness
from autoddl.fitting.experiments import LEAST, BestOfTwo, Contender, Experiment, Worthwhile, choice_of, name_experiments
from autoddl.fitting.ran_plans import priced_plan, shares_at
from autoddl.planner.mesh_search import Progress
from autoddl.validation.clusters import part_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["measure_first", "parts_of"]

MOST = 4
"""Candidates that are looked at: the fastest."""


def measure_first(model: "nn.Module", cluster: Cluster, sample: object, profile: Profile, software: str | None,
                  count: int, progress: Progress, about: Mapping[str, Any], words: Mapping[str, Any]
                  ) -> tuple[BestOfTwo | None, tuple[Worthwhile, ...]]:
    """The choice between the best plans of a model, and up to `count` experiments that would narrow it.

    `cluster` has the constants of `profile`; `about` are name and factory, `words` the options of planning. The choice
    is None where there is one plan alone.
    """
    rows = _distinct(compare(model, cluster, sample, progress=progress, **about, **words))
    candidates = []
    for i, (name, made) in enumerate(rows):
        progress("moving constants of candidates", i, len(rows))
        candidates.append(Contender(name, *shares_at(priced_plan(made, software), profile)))
    choice = choice_of(candidates, profile, max(sureness(made).common for _, made in rows) / EIGHTY)
    if choice is None or choice.spread < LEAST:
        return choice, ()
    whole = [Experiment(f"{one.name}, all devices", made, one.seconds, one.shares)
             for one, (_, made) in zip(candidates, rows, strict=True)]
    parts = list(_on_parts(model, cluster, sample, profile, software, progress, about, words))
    return choice, name_experiments(choice, [*parts, *whole], profile, count)


def parts_of(cluster: Cluster) -> tuple[Cluster, ...]:
    """Smaller clusters: 1, 2, 4 ... devices as far as they fill whole units, and one unit of every level."""
    sizes = sorted({*(2**k for k in range(cluster.size.bit_length())), *cluster.units} - {cluster.size})
    found = []
    for size in sizes:
        if size < cluster.size:
            with suppress(InputError):
                found.append(part_of(cluster, size))
    return tuple(found)


def _distinct(rows: Sequence[Comparison]) -> list[tuple[str, Plan]]:
    """The fastest plans of a comparison that have not the same seconds as one before."""
    known: dict[float, tuple[str, Plan]] = {}
    for row in rows:
        if row.plan is not None:
            known.setdefault(round(row.plan.predicted.seconds, 12), (row.name, row.plan))
    return [known[seconds] for seconds in sorted(known)][:MOST]


def _on_parts(model: "nn.Module", cluster: Cluster, sample: object, profile: Profile, software: str | None,
              progress: Progress, about: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[Experiment]:
    """The best plan on every part of the cluster where one fits."""
    free = {name: value for name, value in words.items() if name not in ("mesh", "mine", "pins")}
    for i, part in enumerate(parts := parts_of(cluster)):
        progress("planning experiments", i, len(parts))
        with suppress(Infeasible, InputError):
            made = plan(model, part, sample, **about, **free)
            yield Experiment(f"{part.size} of {cluster.size} devices", made,
                             *shares_at(priced_plan(made, software), profile))
