"""Checks the rows of bytes of one plan against its memory line, from its graph and layouts alone.

A bound under a budget rests on rows: sums over moments of weight * bytes, which the memory line is never below. The
certificate proves the bound of the row; here the row itself is checked. Bytes at every moment are added up again, from
the layouts that the plan names, without the tables and lifetimes of `pricing`:

    tables' bytes at t == bytes at t made again <= memory line at t        for every moment t of the row

Moments of a step of n ops are numbered in this order:

    2 i            before op i
    2 i + 1        op i with its outputs
    3 n - 1 - i    the backward of op i
    3 n            the update
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoddl.core.graph import Graph
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.explain.rows.row_bytes import bytes_at_moments
from autoddl.schedule.memory_line import predict_memory

__all__ = ["check_row", "line_at_moments", "numbers_of"]

SAME = 1e-9
"""Bytes that differ by less, relatively, are equal."""


def numbers_of(graph: Graph, moment: str) -> tuple[int, ...]:
    """The numbers of a moment that is given by name, three of them for an `around`."""
    count = len(graph.ops)
    if moment == "update":
        return (3 * count,)
    kind, _, name = moment.partition(" ")
    i = next(i for i, op in enumerate(graph.ops) if op.name == name)
    places = {"before": (2 * i,), "forward": (2 * i + 1,), "backward": (3 * count - 1 - i,)}
    return places[kind] if kind in places else (2 * i, 2 * i + 1, 3 * count - 1 - i)


def check_row(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, row: Mapping[str, float],
              claimed: Mapping[str, float], codecs: Sequence[str] = ()) -> float:
    """The largest ratio of claimed bytes to the memory line over the moments of `row`.

    `claimed` are the bytes of each moment by the tables, `codecs` the messages that may be coded. An op without a
    backward has no point on the line: there the peak counts. Raises AssertionError where the tables claim other bytes
    than the layouts have, or more than the line.
    """
    again, line, worst = bytes_at_moments(plan, graph, optimizer, cluster, codecs), line_at_moments(
        plan, graph, optimizer, cluster), 0.0
    assert abs(sum(row.values()) - 1) <= SAME and min(row.values()) >= 0, "the weights of a row add up to one"
    for moment in row:
        numbers, nbytes = numbers_of(graph, moment), claimed[moment]
        found, most = max(again[n] for n in numbers), max(line[n] for n in numbers) or max(line)
        fits = nbytes <= found * (1 + SAME) if len(numbers) > 1 else abs(nbytes - found) <= SAME * found
        assert fits, f"the row of {moment!r} claims {nbytes:.0f} bytes, the layouts have {found:.0f}"
        assert nbytes <= most * (1 + SAME), f"the row of {moment!r} claims {nbytes:.0f} bytes, the line has {most:.0f}"
        worst = max(worst, nbytes / most)
    return worst


def line_at_moments(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> list[float]:
    """By moment, the most bytes of the memory line at its op, in the last microbatch and without buckets."""
    count = len(graph.ops)
    line = predict_memory(replace(plan, bucket_bytes=1), graph, optimizer, cluster).line
    found, before = defaultdict[int, float](float), -1
    for here, nbytes in line:
        if here < count <= before:  # the next microbatch begins
            found.clear()
        found[here] = max(found[here], nbytes)
        before = here
    forward = [found[i] for i in range(count) for _ in range(2)]
    return [*forward, *(found[here] for here in reversed(range(count, 2 * count))), found[2 * count]]
