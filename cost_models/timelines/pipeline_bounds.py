"""Bounds the seconds of a pipeline from below by paths of its task graph, for all seconds of its stages at once.

The tasks of `pipelines` start as soon as the tasks before them have ended. Which these are follows from the schedule
alone: what an action needs, the order on each rank, the order of a sender, the reductions. So for all seconds x >= 0

    makespan(x) = max over the paths of this graph of the sum of the seconds of the tasks on the path
                = max over paths of  c . x          with c = how often each of x is on the path, all >= 0

Each path is therefore a linear lower bound of every makespan of the same schedule. A critical path of one simulation is
exact there (`critical_path`). Slowdowns and shared links only lengthen a run, so the bounds hold then too. Reductions
order ranks that share a stage, so a path with some holds only where stages are reduced.

Other paths are known before any simulation (`closed_paths`). Let stage s have f, b, w seconds per microbatch, t their
sum, and let p be one transfer. The paths are put together from

    down(F)    F of a microbatch at stage 0 and on to this one         sum of f + p
    dive(F)    from it on to the last stage and back to its B          sum of f + b (+ w where W is not split off) + 2p
    up(B)      from it back to stage 0                                 sum of b (+ w) + p
    row        the actions of a rank, in order

Each starts with the gathered parameters of its first stage, and ends with reduction and update of its last stage:

    A  down, the whole row, up               1F1B: sum over j < s of (t_j + 2p) + m t_s
    Q  down, dive, the rest of the row, up   1F1B: sum of t + (m-K) f_s + (m-1)(b_s + w_s) + 2 sum of p, K in flight
    P  Q, with a second dive from the last F of the row
    Z  A, with a dive from the last F of the row
    R  a dive from each F that follows the B where the dive before ended

They go up from the last B of the row, or end on the rank with its last W. Where ranks have several stages, or stages
several ranks, the same words hold: the row has all of them.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from autoddl.core.pipeline import Action, Schedule
from autoddl.core.pipeline_cuts import CutProblem, PathBound, StageSeconds
from autoddl.cost_models.timelines.events import run_sequentially
from autoddl.cost_models.timelines.pipelines import ONCE, PipelineTasks, pipeline_tasks

__all__ = ["closed_paths", "critical_path", "done_once", "trace_cut", "trace_mean"]


TERMS = {"F": (0,), "B": (1,), "W": (2,), "BW": (1, 2), "gather": (3,), "reduce": (4,), "update": (5,)}
"""The places in StageSeconds of the seconds of a task, by its source."""


def done_once(stages: Sequence[StageSeconds]) -> tuple[str, ...]:
    """The tasks of ONCE that take time in some stage."""
    return tuple(what for what in ONCE if any(getattr(one, what) for one in stages))


def critical_path(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float],
                  once: tuple[str, ...] | None = None) -> tuple[float, PathBound]:
    """(makespan in seconds, a path that takes as long); `transfers` are the seconds of each boundary.

    The makespan is that of `simulate_pipeline` without a slowdown. Tasks in `once` run even where they take 0 seconds
    in every stage; by default those run that take time in one.
    """
    work, before = _tasks(schedule, done_once(stages) if once is None else once)
    each = {(what, s): sum(one[k] for k in terms) for what, terms in TERMS.items() for s, one in enumerate(stages)}
    each.update({("send", boundary): x for boundary, x in enumerate(transfers)})
    starts, ends = run_sequentially([each[source] for source in work.sources], work.edges)
    path = [max(range(len(ends)), key=ends.__getitem__)]
    while starts[path[-1]] > 0:
        path.append(next(task for task in before[path[-1]] if ends[task] == starts[path[-1]]))
    return ends[path[0]], _bound(schedule, work, path[::-1])


@lru_cache(maxsize=64)
def _tasks(schedule: Schedule, once: tuple[str, ...]) -> tuple[PipelineTasks, tuple[tuple[int, ...], ...]]:
    """(tasks of a schedule with transfers, for each the tasks that it waits for)."""
    work = pipeline_tasks(schedule, ("send", *once))
    before: list[list[int]] = [[] for _ in work.tasks]
    for task, later in enumerate(work.edges[0]):
        for after in later:
            before[after].append(task)
    return work, tuple(map(tuple, before))


def trace_cut(problem: CutProblem, cut: Sequence[int]) -> tuple[float, PathBound]:
    """`critical_path` of a cut, in blocks per stage, whose stages take their least seconds."""
    return trace_mean(problem, [cut], [1.0])


def trace_mean(problem: CutProblem, cuts: Sequence[Sequence[int]], shares: Sequence[float]
               ) -> tuple[float, PathBound]:
    """`critical_path` where every stage takes the mean of its least seconds in these cuts, by their shares of sum 1."""
    each = [(cut, share) for cut, share in zip(cuts, shares, strict=True) if share > 0]
    rows = [problem.seconds[np.arange(len(cut)), np.array(cut) - 1] * share for cut, share in each]
    stages = [StageSeconds(*row) for row in np.sum(rows, axis=0).tolist()]
    sent = problem.transfers if problem.sent is None else np.sum(
        [np.array(problem.sent_at(cut)) * share for cut, share in each], axis=0).tolist()
    once = tuple(what for i, what in enumerate(ONCE, start=3) if bool((problem.seconds[:, :, i] > 0).any()))
    return critical_path(problem.schedule, stages, sent, once)


def closed_paths(schedule: Schedule, once: tuple[str, ...] = ()) -> tuple[PathBound, ...]:
    """The paths A, P, Q, R and Z of every rank, each with other numbers; `once` says what of ONCE the stages do."""
    work, _ = _tasks(schedule, once)
    place = {task.name: i for i, task in enumerate(work.tasks)}
    found: dict[tuple[object, ...], PathBound] = {}
    for row in schedule.actions:
        for actions in _paths(schedule, row) if row else ():
            names = _begin(actions[0], once) + _moves(schedule, actions) + _end(schedule, work, actions[-1], once)
            bound = _bound(schedule, work, [place[name] for name in names])
            found.setdefault((bound.stages, bound.transfers), bound)
    return tuple(found.values())


def _bound(schedule: Schedule, work: PipelineTasks, path: Sequence[int]) -> PathBound:
    """The bound of a path, each of whose tasks must wait for the one before."""
    assert all(task in work.edges[0][before] for before, task in pairwise(path)), \
        f"no path: {[work.tasks[task].name for task in path]}"
    stages = [[0] * len(StageSeconds._fields) for _ in range(schedule.stages)]
    transfers = [0] * (schedule.stages - 1)
    for task in path:
        what, at = work.sources[task]
        if what == "send":
            transfers[at] += 1
        else:
            for term in TERMS[what]:
                stages[at][term] += 1
    return PathBound(tuple(work.tasks[task].name for task in path), tuple(map(tuple, stages)), tuple(transfers))


def _paths(schedule: Schedule, row: Sequence[Action]) -> Iterator[list[Action]]:
    """A, Z, Q, P and R of one rank, down to it and up from it."""
    first, last = row[0], max(i for i, action in enumerate(row) if action.kind == "F")
    down = [Action(stage, "F", first.microbatch, first.pipe) for stage in range(first.stage)]
    dived, back = _dive(schedule, row, 0)
    again, end = _dive(schedule, row, last)
    bodies = [list(row), [*row[:last], *again, *row[end + 1:]], [*dived, *row[back + 1:]], _dives(schedule, row)]
    if back < last:
        bodies.append([*dived, *row[back + 1:last], *again, *row[end + 1:]])
    for body in bodies:
        yield down + body
        turn = max(i for i, action in enumerate(body) if action.kind == "B")
        yield down + body[:turn] + _up(schedule, body[turn])
    yield list(row)


def _dive(schedule: Schedule, row: Sequence[Action], at: int) -> tuple[list[Action], int]:
    """(from the F at place `at` to the last stage and back to its B, the place of that B in the row)."""
    stage, _, microbatch, pipe = row[at]
    there = [Action(s, "F", microbatch, pipe) for s in range(stage, schedule.stages)]
    back = [Action(s, "B", microbatch, pipe) for s in reversed(range(stage, schedule.stages))]
    return there + back, row.index(back[-1])


def _dives(schedule: Schedule, row: Sequence[Action]) -> list[Action]:
    """A dive from the first F, from the next one behind the B where that ends, and so on."""
    found: list[Action] = []
    at = 0
    while at < len(row):
        if row[at].kind == "F":
            dived, at = _dive(schedule, row, at)
            found += dived
        else:
            found.append(row[at])
        at += 1
    return found


def _up(schedule: Schedule, action: Action) -> list[Action]:
    """From a B back to stage 0, then all that is left there."""
    chain = [action._replace(stage=stage) for stage in reversed(range(action.stage + 1))]
    row = schedule.actions[schedule.rank(chain[-1])]
    return chain + list(row[row.index(chain[-1]) + 1:])


def _moves(schedule: Schedule, actions: Sequence[Action]) -> list[str]:
    """Names of the actions, with the transfers between them."""
    names = [str(actions[0])]
    for action, after in pairwise(actions):
        if schedule.rank(action) != schedule.rank(after):
            names.append(f"{action} to {schedule.rank(after)}")
        names.append(str(after))
    return names


def _begin(action: Action, once: tuple[str, ...]) -> list[str]:
    """Names of the tasks before an F with which a path begins."""
    return [f"gather {action.stage}"] if "gather" in once else []


def _end(schedule: Schedule, work: PipelineTasks, action: Action, once: tuple[str, ...]) -> list[str]:
    """Names of the tasks after the last action of a rank: its stage's reduction, then the updates of the rank."""
    rank = (schedule.rank(action),)
    updates = [task.name for task in work.tasks if task.kind == "update" and task.ranks == rank]
    if "reduce" not in once:
        return updates
    own = f"update {action.stage} on {rank[0]}"
    return [f"reduce {action.stage}", *(updates[updates.index(own):] if updates else [])]
