"""Words that a device sends in one step of a few linears, at the best plan: python examples/benchmarks/volume.py

The linears are the four of a Transformer layer (qkv, projection, two of the MLP) and the three of VGG's classifier, on
p ranks. `3-axis` is the sum over the linears of the fewest words on any grid p1 p2 p3, each with a grid of its own: it
leaves out what it costs to go from one linear's grid to the next one's. The formulas and `bound` are in `linears`.

A plan is priced where only words cost: devices compute in no time, one flat level has no latency. Every linear splits
its work on every axis, and the first input and the last output are stored in p pieces; all else is free. `between` are
the all-to-alls that join the grids of `3-axis`, which are listed: no plan should send more than both together. In place
of attention stands a sum of relu over q, k and v, in which every rank keeps the rows and columns that it has.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, prod

import torch
from linears import Linears, Size, bound, classifier, grids, transformer, words
from search_table import Row, write

from autoddl.capture.capture import capture
from autoddl.core.conversion import Step, group_size, payload, ring_bytes
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Op
from autoddl.core.graph import Tensor as Value
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import B, Layout, Mesh, Split
from autoddl.core.plan import Conversion
from autoddl.core.problem import Problem, Solution
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.assemble import assemble
from autoddl.planner.meshes import meshes
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Region, Variable, variables
from autoddl.search import solve

WORD = 4
TEXT = """
name: words
device: {name: free, memory: 1e30 B, bandwidth: 1e30 B/s, peak: {float32: 1e30 FLOP/s}, launch: 0 s}
levels: [{name: net, size: %d, bandwidth: 4 B/s, latency: 0 s, efficiency: 1}]
"""
"""A link carries one word a second."""

Allowed = Callable[[int, tuple[str, ...]], bool]
"""Whether linear i may split, by axis, its rows `m`, its columns `n` or its contraction `k`."""


def split_of(x: Layout, w: Layout) -> tuple[str, ...]:
    """By axis; `` where the work is not split."""
    names = {(Split(0), B): "m", (B, Split(0)): "n", (Split(1), Split(1)): "k"}
    return tuple(names.get((a, b), "") for a, b in zip(x, w, strict=True))


def region(allowed: Allowed) -> Region:
    """Every linear splits its work on every axis, as is allowed; the ends are stored in pieces."""
    def inside(graph: Graph, item: Op | Value, choice: Choice) -> bool:
        if isinstance(item, Value):
            return not choice.regather and (item.fqn != "x" or B not in choice.outputs[0].states)
        if item.target == "aten.linear.default":
            split = split_of(*choice.inputs)
            return all(split) and allowed(linears(graph).index(item.name), split)
        return item.name != ending(graph) or all(isinstance(state, Split) for state in choice.outputs[0])
    return inside


def linears(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops if op.target == "aten.linear.default"]


def ending(graph: Graph) -> str:
    """The op behind which the loss begins."""
    return [op.name for op in graph.ops if "relu" in op.target][-1]


@dataclass(frozen=True, slots=True)
class Moved:
    """Words of all, the mesh with the grid of every linear, and the all-to-alls with their words."""

    total: float
    where: str = ""
    between: tuple[tuple[str, float], ...] = ()


def least(graph: Graph, place: Cluster, tried: Iterable[Mesh], allowed: Callable[[Mesh], Allowed]) -> Moved:
    """The best plan over the meshes on which there is one."""
    found = Moved(inf)
    for mesh in tried:
        pricing = Pricing(graph, mesh, place, "sgd")
        try:
            space = variables(graph, mesh, region(allowed(mesh)))
        except InputError:
            continue
        problem = problem_of(pricing, space, None)
        solution = solve(problem)
        assert solution.is_optimal
        if solution.seconds < found.total * (1 - 1e-6):
            found = moved(pricing, problem, solution, space)
    return found


def moved(pricing: Pricing, problem: Problem, solution: Solution, space: tuple[Variable, ...]) -> Moved:
    """What a solution sends."""
    made, graph, mesh = assemble(pricing, solution, space), pricing.graph, pricing.mesh
    total = sum(made.predicted.volume.values()) / WORD
    assert abs(total - solution.seconds) < 1e-3 * total, "words are not all that costs"
    decided = {d.name: d for d in made.decisions}
    used = [grid_of(mesh, split_of(*decided[name].inputs)) for name in linears(graph)]
    found = [(f"{c.tensor} -> {c.op}: {', '.join(c.forward) or '-'}; gradient {', '.join(c.backward) or '-'}",
              between(c, graph, mesh)) for c in made.conversions]
    return Moved(total, f"{mesh}: {', '.join('x'.join(map(str, grid)) for grid in used)}",
                 tuple(pair for pair in found if pair[1]))


def grid_of(mesh: Mesh, split: tuple[str, ...]) -> Size:
    a, b, c = (prod(n for n, s in zip(mesh.sizes, split, strict=True) if s == name) for name in "mnk")
    return a, b, c


def between(conversion: Conversion, graph: Graph, mesh: Mesh) -> float:
    """Words of its all-to-alls."""
    tensor, total = next(t for t in graph.tensors if t.name == conversion.tensor), 0.0
    for texts, here in ((conversion.forward, conversion.source), (conversion.backward, conversion.gradient)):
        for step in (Step.parse(text, mesh) for text in texts):
            assert here is not None
            if step.kind == "all-to-all":
                whole = payload(step, tensor.shape, WORD, here, mesh)
                total += ring_bytes(step.kind, group_size(step, mesh), whole) / WORD
            here = step.after(here)
    return total


def of_grids(sizes: tuple[Size, ...], p: int) -> Callable[[Mesh], Allowed]:
    """Every linear on a grid that is best for it alone."""
    best = [min(words(size, grid) for grid in grids(p)) for size in sizes]

    def on(mesh: Mesh) -> Allowed:
        def allowed(i: int, split: tuple[str, ...]) -> bool:
            return words(sizes[i], grid_of(mesh, split)) <= best[i] * (1 + 1e-9)
        return allowed
    return on


def only(*roles: str) -> Callable[[Mesh], Allowed]:
    """Axis by axis, what every linear may split."""
    return lambda mesh: lambda i, split: all(s in role for s, role in zip(split, roles, strict=True))


def row(title: str, model: Linears, p: int) -> tuple[Row, tuple[str, ...]]:
    """One line of the table, and the conversions of the plan and of the best grids."""
    place, sizes = parse_cluster(TEXT % p, "words"), model.sizes
    graph = add_hubs(capture(model, (torch.zeros(()),)).graph)
    every = [m for m in meshes(place, 4) if len(m.axes) < 4 or m.sizes == tuple(sorted(m.sizes, reverse=True))]
    one, two = ([m for m in every if len(m.axes) == n] for n in (1, 2))
    alone = sum(min(words(size, grid) for grid in grids(p)) for size in sizes)
    data, tensor = (least(graph, place, one, only(role)) for role in ("m", "nk"))
    grid = min(data, tensor, least(graph, place, two, only("m", "nk")), key=lambda moved: moved.total)
    plan = least(graph, place, every, lambda mesh: lambda i, split: True)
    joined = least(graph, place, every, of_grids(sizes, p))
    other = sum(n for _, n in joined.between)
    assert plan.total <= joined.total * (1 + 1e-9) and abs(alone + other - joined.total) < 1e-3 * alone
    figures = (data.total, tensor.total, grid.total, plan.total, alone, other, sum(bound(size, p) for size in sizes))
    lists = tuple(f"- {title} on {p}, {name}: {m.total / 1e6:.2f} on {m.where}" + "".join(
        f"; {line}: {n / 1e6:.2f}" for line, n in m.between) for name, m in (("plan", plan), ("3-axis", joined))
        if name == "plan" or m.between)
    return (title, str(p), *(f"{n / 1e6:.2f}" for n in figures)), lists


TRANSFORMERS = ((1024, 16384, 16), (4096, 16384, 16), (4096, 65536, 64), (8192, 65536, 64), (12288, 65536, 512))
CLASSIFIERS = (8, 16, 32, 64)


def cases() -> Iterator[tuple[str, Linears, int]]:
    for h, rows, p in TRANSFORMERS:
        yield f"layer {h}, {rows >> 10}k tokens", transformer(h, rows), p
    for p in CLASSIFIERS:
        yield "VGG classifier, 32 a device", classifier(32 * p), p


def main() -> None:
    lists: list[str] = []

    def rows() -> Iterator[Row]:
        yield ("Mwords a device", "p", "data parallel", "tensor parallel", "best grid", "plan", "3-axis", "between",
               "bound")
        for case in cases():
            line, more = row(*case)
            lists.extend(more)
            yield line
    write(rows())
    print("\n".join(lists))


if __name__ == "__main__":
    main()
