"""The bytes that one rank holds over the predicted step.

    held(t) = fixed + stored + sum over what is kept for backward of its bytes, while it is kept + the moment's bytes

What a factor of the plan's problem retains belongs to the last op it is laid over: it is there from the forward of that
op (of one that takes no time: of the op before it) until its backward is done, in every microbatch. Stored parameters,
their gradients and the optimizer's state, and gathered copies that last through several microbatches, are there all the
time. The transient bytes of an op are there while it runs. So the line never rises above `Problem.nbytes`, which
charges the worst moment to the whole step.
"""

from collections import defaultdict
from dataclasses import dataclass

from autoddl.graph import Op
from autoddl.plan import Plan
from autoddl.rebuild import Rebuilt, rebuild
from autoddl.timeline_of import Foreseen, Span

__all__ = ["MemoryLine", "memory_line"]


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """From `times[i]` seconds on, `nbytes[i]` are held; `bound` is what the plan says of its peak."""

    times: tuple[float, ...]
    nbytes: tuple[float, ...]
    bound: float

    @property
    def peak(self) -> float:
        return max(self.nbytes)


def memory_line(plan: Plan, foreseen: Foreseen) -> MemoryLine:
    """The line of rank 0. Raises what `rebuild` raises."""
    made = rebuild(plan)
    always, kept, moment = _shares(made)
    changes: dict[float, float] = defaultdict(float)
    places: dict[str, list[Span]] = defaultdict(list)
    for span in foreseen.computes:
        places[span.name].append(span)
    stays = [(0.0, foreseen.step.seconds)]
    for name in (op.name for op in made.pricing.graph.ops):
        stays = _stays(places[name], plan.microbatches, foreseen.step.seconds) or stays
        for start, end in stays:
            changes[start] += kept.get(name, 0.0)
            changes[end] -= kept.get(name, 0.0)
        for span in places[name]:
            changes[span.start] += moment.get(name, 0.0)
            changes[span.end] -= moment.get(name, 0.0)
    times, held, line = [0.0], always, [always]
    for time in sorted(changes):
        held += changes[time]
        times.append(time)
        line.append(held)
    return MemoryLine(tuple(times), tuple(line), plan.predicted.peak_bytes)


def _shares(made: Rebuilt) -> tuple[float, dict[str, float], dict[str, float]]:
    """Bytes held all the time; kept, and transient, by the op to which they belong."""
    always, kept = made.problem.fixed_bytes, defaultdict[str, float](float)
    moment = defaultdict[str, float](float)
    for factor, (table, cell) in zip(made.problem.factors, made.problem.cells(made.choice), strict=True):
        _, retained, transient = table.at(cell)
        items = [made.variables[v].item for v in factor.variables]
        last = items[-1]
        lasting = made.pricing.microbatches > 1 and not isinstance(items[0], Op)
        if not isinstance(last, Op) or lasting:
            always += retained
        else:
            kept[last.name] += retained
        if isinstance(last, Op):
            moment[last.name] = max(moment[last.name], transient)
    return always, dict(kept), dict(moment)


def _stays(spans: list[Span], parts: int, end: float) -> list[tuple[float, float]]:
    """From each forward until its backward is done; an op with no backward is held on to until the end."""
    if len(spans) == 2 * parts:
        return [(spans[2 * i].end, spans[2 * i + 1].end) for i in range(parts)]
    return [(span.end, end) for span in spans]
