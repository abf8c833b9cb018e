"""Random pipelines of unequal stages, over all schedules, and their seconds as simulated."""

import random
from collections.abc import Sequence

from autoddl.core.pipeline import Action, Schedule, needs
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.timelines.pipelines import simulate_pipeline

__all__ = ["NAMES", "draw_schedule", "draw_stages", "draw_transfers", "draw_written", "makespan"]

NAMES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "chimera:1",
         "chimera:2", "written")


def draw_schedule(rng: random.Random, name: str, most_ranks: int = 4) -> Schedule:
    """A schedule of this name, of at most `most_ranks` ranks where that is possible, and few microbatches."""
    if name.startswith("chimera"):
        pipes = 2 * int(name[-1])
        ranks = pipes * rng.randint(1, max(1, most_ranks // pipes))
        return generate(name, ranks, pipes * rng.randint(1, 6))
    ranks = rng.randint(1, most_ranks)
    if name == "written":
        return draw_written(rng, ranks, rng.randint(1, 6))
    if name.startswith("interleaved"):
        return generate(name, ranks, ranks * rng.randint(1, 3))
    return generate(name, ranks, rng.randint(2 * ranks if name == "dualpipe-v" else 1, 3 * ranks))


def draw_written(rng: random.Random, ranks: int, microbatches: int) -> Schedule:
    """A schedule that somebody may have written: ranks run whatever they may in any order; some backwards are split.

    Stages lie along the ranks, round them twice, or there and back.
    """
    line = tuple(range(ranks))
    where = rng.choice((line, line, line + line, line + line[::-1]))
    share, rows = rng.choice((0.0, 0.5, 1.0)), [list[Action]() for _ in line]
    left = {Action(s, kind, m) for s in range(len(where)) for m in range(microbatches) for kind in ("F", "B", "W")
            if kind != "W" or rng.random() < share}
    done, made = set[Action](), Schedule((where,), ((),) * ranks, microbatches)
    while left:
        one = rng.choice(sorted(one for one in left if done.issuperset(needs(one, made))))
        rows[made.rank(one)].append(one)
        done.add(one)
        left.remove(one)
    return Schedule((where,), tuple(map(tuple, rows)), microbatches)


def draw_stages(rng: random.Random, count: int, once: bool) -> list[StageSeconds]:
    """Seconds of stages, some of them 0; where `once`, with tasks that run once a step, of the first stage at least."""
    def draw(most: float, least: float = 0.0) -> float:
        return rng.choice((least, rng.uniform(0.2, 1.0) * most, rng.uniform(0.2, 1.0) * most))

    return [StageSeconds(*(draw(1.5) for _ in range(3)), *(draw(3.0, float(not s)) if once else 0.0 for _ in range(3)))
            for s in range(count)]


def draw_transfers(rng: random.Random, stages: int) -> list[float]:
    """Seconds of a transfer at each boundary, some of them 0."""
    return [rng.choice((0.0, rng.uniform(0.0, 0.4))) for _ in range(stages - 1)]


def makespan(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float], slowdown: float = 1.0
             ) -> float:
    """Seconds as simulated."""
    f, b, w, gather, reduce, update = map(list, zip(*stages, strict=True))
    return simulate_pipeline(schedule, f, b, w, transfers, reduce, slowdown, gather_seconds=gather,
                             update_seconds=update).makespan
