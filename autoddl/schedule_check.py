"""Whether a schedule can run: every microbatch once through every stage, forward and backward, and nobody stuck.

    1  placement: pipes of equally many stages, on ranks that have a list
    2  every action names a stage, pipe and microbatch that exist, on the rank where the stage is, and only once
    3  every microbatch goes through one pipe, with an F and a B at each of its stages
    4  run rank by rank, every action finds what it `needs` finished

The first breach is raised with rank and step in words, and the schedule with that row marked.
"""

from autoddl.errors import InputError
from autoddl.schedule import Action, Kind, Schedule, needs

__all__ = ["validate"]


def validate(schedule: Schedule) -> None:
    """Raise InputError at the first breach."""
    _placement(schedule)
    _each(schedule)
    _complete(schedule)
    _runs(schedule)


def _fail(schedule: Schedule, rank: int, step: int, words: str) -> InputError:
    """`step` counts from 1; one past the end marks what is missing there."""
    rows = []
    for row, actions in enumerate(schedule.actions):
        texts = [f"[{a}]" if (row, i) == (rank, step) else str(a) for i, a in enumerate(actions, start=1)]
        if row == rank:
            texts += ["[]"] * (step > len(actions)) + ["   <-- here"]
        rows.append(f"  rank {row}: {' '.join(texts)}")
    return InputError("\n".join((f"rank {rank}, step {step}: {words}", *rows)))


def _placement(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or len({len(pipe) for pipe in schedule.placement}) != 1 or not schedule.stages:
        raise InputError(f"{str(schedule).splitlines()[0]!r}: a schedule has at least one microbatch and stage, "
                         "and equally many stages in every pipe")
    beyond = sorted({rank for pipe in schedule.placement for rank in pipe if rank >= len(schedule.actions)})
    if beyond:
        raise InputError(f"stages are placed on rank {beyond[0]}, but actions are given for "
                         f"{len(schedule.actions)} ranks; add a line 'rank {beyond[0]}: ...'")


def _each(schedule: Schedule) -> None:
    """Every action is possible where it stands, and stands once."""
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions, start=1):
            if action.pipe >= len(schedule.placement) or action.stage >= schedule.stages:
                raise _fail(schedule, rank, step, f"{action} names a stage that is nowhere; there are pipes 0 to "
                            f"{len(schedule.placement) - 1} with stages 0 to {schedule.stages - 1}")
            if action.microbatch >= schedule.microbatches:
                raise _fail(schedule, rank, step, f"{action}: the microbatches are 0 to {schedule.microbatches - 1}")
            if schedule.rank(action) != rank:
                raise _fail(schedule, rank, step, f"{action} is of a stage on rank {schedule.rank(action)}; "
                            "move it there")
            if action in seen:
                raise _fail(schedule, rank, step, f"{action} has been run before; every action runs once")
            seen.add(action)


def _complete(schedule: Schedule) -> None:
    """Nothing is missing."""
    seen = set(schedule)
    kinds: tuple[Kind, ...] = ("F", "B")
    for microbatch in range(schedule.microbatches):
        pipes = sorted({action.pipe for action in seen if action.microbatch == microbatch}) or [0]
        for stage in range(schedule.stages):
            for kind in kinds:
                action = Action(stage, kind, microbatch, pipes[0])
                if action not in seen:
                    rank = schedule.rank(action)
                    raise _fail(schedule, rank, len(schedule.actions[rank]) + 1, f"the rank ends without {action}; "
                                "every microbatch goes through every stage, forward and backward")
        if len(pipes) > 1:
            extra = next(a for a in schedule if a.microbatch == microbatch and a.pipe == pipes[1])
            rank = schedule.rank(extra)
            raise _fail(schedule, rank, schedule.actions[rank].index(extra) + 1,
                        f"{extra}: microbatch {microbatch} goes through pipe {pipes[0]} already")


def _runs(schedule: Schedule) -> None:
    """Run all ranks as far as they come; if one is stuck, say where and for what it waits."""
    done: set[Action] = set()
    at = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions) and done.issuperset(needs(actions[at[rank]], schedule)):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if at[rank] < len(actions)]
    if stuck:
        raise _stuck(schedule, stuck, at, done)


def _stuck(schedule: Schedule, stuck: list[int], at: list[int], done: set[Action]) -> InputError:
    """A rank that waits for itself explains most; else the first."""
    found = []
    for rank in stuck:
        action = schedule.actions[rank][at[rank]]
        missing = next(need for need in needs(action, schedule) if need not in done)
        owner = schedule.rank(missing)
        later = f"which comes later on the same rank, at step {schedule.actions[rank].index(missing) + 1}" \
            if owner == rank else f"which rank {owner} runs only after {schedule.actions[owner][at[owner]]}"
        found.append((owner != rank, rank, f"{action} waits for {missing}, {later}"))
    _, rank, words = min(found)
    return _fail(schedule, rank, at[rank] + 1, f"{words}; so none of them ever runs")
