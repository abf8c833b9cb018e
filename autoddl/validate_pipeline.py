"""The pipeline of a published run: its schedule's time line, with the activations sent between stages.

The line ends when the last rank is done; where the optimizer of a zero-bubble schedule waits for nobody, it is as long
as the longest rank's own.
"""

from functools import lru_cache

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models import Cluster, Group, collective
from autoddl.cost_models.pipelines import pipeline
from autoddl.validate_parts import Unpriced, schedule_of
from autoddl.validate_runs import Run

__all__ = ["pipeline_seconds"]


def _boundaries(run: Run, cluster: Cluster, microbatch: int, chunks: int) -> tuple[float, ...]:
    """Seconds to send x from each stage to the next."""
    width = run.tp if run.sequence or run.tp > 1 else 1
    nbytes = 2.0 * microbatch * run.seq * run.hidden / (run.cp * width)
    stride, node = run.dp * run.tp * run.cp, min(run.node, run.gpus)
    far = collective(cluster, "send", Group(((run.pp, stride),)), nbytes).seconds
    near = collective(cluster, "send", Group(((2, stride),)), nbytes).seconds if 2 * stride <= node else far
    stages = run.pp * chunks
    return tuple(near if (s % run.pp) * stride // node == ((s + 1) % run.pp) * stride // node else far
                 for s in range(stages - 1))


def pipeline_seconds(run: Run, cluster: Cluster, stages: tuple[tuple[float, ...], ...], count: int, microbatch: int
                     ) -> float:
    """The time line's end; where the optimizer of a zero-bubble schedule does not wait, the longest rank's."""
    forward, backward, weight = stages
    if run.pp == 1:
        return count * sum(map(sum, stages))
    name, chunks = schedule_of(run)
    if chunks > 1 and count % run.pp:
        raise Unpriced(f"{count} microbatches are no multiple of {run.pp} stages, which interleaving needs")
    return _line(name, run.pp, count, forward, backward, weight, _boundaries(run, cluster, microbatch, chunks))


@lru_cache(maxsize=4_000)
def _line(name: str, ranks: int, count: int, forward: tuple[float, ...], backward: tuple[float, ...],
          weight: tuple[float, ...], between: tuple[float, ...]) -> float:
    try:
        line = pipeline(generate(name, ranks, count), forward, backward, weight, between)
    except InputError as error:
        raise Unpriced(str(error)) from None
    if not name.startswith("zb"):
        return line.makespan
    spans = [[at for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
              if task.ranks == (rank,) for at in (start, end)] for rank in range(ranks)]
    return max(max(span) - min(span) for span in spans)
