"""Finds out what would fit where no plan does: a larger budget, more devices, microbatches, a smaller batch.

    budget         the peak of the smallest plan that is known, rounded up to what one would write
    devices        the outermost level two and four times as large
    microbatches   the same batch in two, four, eight times as many parts: the fewest that fit
    recompute      every block recomputed in backward
    batch          the leading dim of the sample's tensors halved, and the model captured again with it

Nothing is estimated by scaling: every row is a search of its own, with the seconds of its best plan.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.precision import Precision
from autoddl.core.recompute import blocks_of
from autoddl.cost_models import Cluster, load_cluster, show_bytes
from autoddl.cost_models.units import bytes_above
from autoddl.explain.pareto import resized
from autoddl.planner.mesh_search import Progress
from autoddl.planner.options import Options, PlanOptions
from autoddl.planner.question import Question, solve_question
from autoddl.planner.task import planned_graph

if TYPE_CHECKING:
    from torch import nn

    from autoddl.capture.sample import Sample

__all__ = ["Relaxation", "check_relaxable", "relaxations"]

ROOM = 1 + 1e-9
"""The smallest plan again, with room for the rounding of its sum."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One constraint relaxed, and the best plan then: `seconds` a step and `nbytes` of a rank.

    `seconds` is None, and `detail` says why, if still no plan fits.
    """

    what: str
    seconds: float | None
    nbytes: float
    detail: str = ""


def relaxations(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, reachable: float,
                progress: Progress | None = None, **options: Unpack[Options]) -> tuple[Relaxation, ...]:
    """The relaxations of a plan request that no plan fits, the fastest first.

    `reachable` is the smallest peak in bytes that the search found (`Infeasible.reachable`); the other arguments are
    those of `plan`. Raises InputError where they ask for stages.
    """
    from autoddl.capture.capture import capture
    from autoddl.capture.sample import as_sample, parted, sample_for

    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    allowed = PlanOptions.of(options)
    check_relaxable(allowed)
    allowed = replace(allowed, budget=allowed.limit(place))
    recipe = Precision.parse(allowed.precision)
    given, counts = sample_for(model) if sample is None else as_sample(sample), allowed.microbatches

    def questions(batch: "Sample", parts: Sequence[int]) -> list[Question]:
        return [Question(planned_graph(capture(model, parted(batch, n), recipe), allowed), place,
                         replace(allowed, microbatches=(n,)), n) for n in parts]

    asked = questions(given, counts)
    found = [*_richer(asked, reachable, progress), *_wider(asked, progress)]
    with suppress(InputError):  # the batch is no multiple
        for n in (2 * counts[-1], 4 * counts[-1], 8 * counts[-1]):
            found.append(_row(f"{n} microbatches", questions(given, [n]), progress))
            if found[-1].seconds is not None:
                break
    if "full" not in allowed.recompute and blocks_of(asked[0].graph):
        again = [replace(one.asking(recompute=("full",)), recompute="full") for one in asked]
        found.append(_row("every block recomputed (--recompute full)", again, progress))
    smaller = _halved(given)
    if smaller is not None:
        what = "half the batch (a step then does half the work)"
        try:
            found.append(_row(what, questions(smaller, counts), progress))
        except AutoDDLError as error:
            found.append(Relaxation(what, None, 0.0, str(error)))
    return tuple(sorted(found, key=lambda row: (row.seconds is None, row.seconds or 0.0)))


def check_relaxable(options: PlanOptions) -> None:
    """Raises InputError for options that ask for stages: every row would be of a plan without any."""
    if options.stages != (1,):
        raise InputError(f"relax prices plans without stages, and stages asks for "
                         f"{', '.join(map(str, options.stages))}: leave one of the two out")


def _richer(asked: Sequence[Question], reachable: float, progress: Progress | None) -> list[Relaxation]:
    """The row of a budget as large as the smallest plan found; none where no plan was found."""
    if not isfinite(reachable):
        return []
    budget = bytes_above(reachable * ROOM)
    enough = [one.asking(budget=budget) for one in asked]
    return [_row(f"a budget of {budget}", enough, progress)]


def _wider(asked: Sequence[Question], progress: Progress | None) -> list[Relaxation]:
    """The rows of two and four times as many devices."""
    place = asked[0].cluster
    if not place.levels:
        return [Relaxation("more devices", None, 0.0, f"cluster {place.name} has no level for them: write one, like "
                                                      "{name: node, size: 2, bandwidth: 25 GB/s, latency: 5 us}")]
    outermost = next((level for level in reversed(place.levels) if level.size > 1), place.levels[-1])
    found = []
    for times in (2, 4):
        what = f"{place.size * times} devices ({outermost.name}: {outermost.size * times})"
        try:
            wider = resized(place, outermost.size * times)
        except InputError as error:
            found.append(Relaxation(what, None, 0.0, str(error)))
            continue
        found.append(_row(what, [replace(one.asking(mesh=None), cluster=wider) for one in asked], progress))
    return found


def _row(what: str, asked: Sequence[Question], progress: Progress | None) -> Relaxation:
    """The row of the best answer to several questions."""
    rows = [_answer(what, one, progress) for one in asked]
    return min(rows, key=lambda row: (row.seconds is None, row.seconds or row.nbytes or inf))


def _answer(what: str, asked: Question, progress: Progress | None) -> Relaxation:
    try:
        best = solve_question(asked, progress).best.solution
    except Infeasible as error:
        return Relaxation(what, None, error.needed, f"still needs {show_bytes(error.needed)}")
    except AutoDDLError as error:
        return Relaxation(what, None, 0.0, str(error))
    return Relaxation(what, best.seconds, best.nbytes)


def _halved(sample: "Sample") -> "Sample | None":
    """The sample with half the batch: of every tensor whose leading dim is the first tensor's; None if that is odd."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(leaf, Tensor)]
    batch = next((t.shape[0] for t in tensors if t.ndim), 1)
    if batch % 2:
        return None

    def half(leaf: Any) -> Any:
        return leaf[:batch // 2] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch else leaf

    args, kwargs = pytree.tree_map(half, (sample.args, dict(sample.kwargs)))
    return replace(sample, args=args, kwargs=kwargs)
