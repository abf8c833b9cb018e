"""What sharded states send over three levels of links, and how long steps take:

    sudo python examples/benchmarks/state_layouts.py [STEPS] [PARTS OF ROWS' NAMES, with commas] [ROUNDS]
        [MICROBATCHES (default: 2)] [HOW MANY TIMES SLOWER (1)]

Eight ranks on links of 50, 12.5 and 3.125 MB/s train layers whose batch is split over all ranks, in microbatches. With
links that are some times slower, what a busy machine computes is a smaller part of a step. Only how weights, gradients
and the optimizer's state are split differs. With weights of P bytes in L layers, m microbatches, k members of an axis,
and I the product of the sizes of the axes inside it, a rank sends

    gathers      (k - 1) / k * P / I, once a step; with the weight split m (2 L - 1) / L times
    reductions   (k - 1) / k * P / I, once a step; with the gradient split m times; unsplit 2 (k - 1) / k * P / I once,
                 since an all-reduce over several levels cuts inside first

or of these the part that a codec leaves: 1/4 of weights in int8, 1/8 of gradients in int4. So an uplink carries what
the ranks behind it send over its axis and over all axes outside it. Prints for each row the bytes of a step over one
uplink of every level: by these forms, planned, counted by the interface; then the seconds that are predicted, and the
median of those measured, in rounds. It fails where rows whose predictions are more than 25 % apart are measured in
another order. Without rounds (0) it prints what is predicted alone, and needs no root.

    python examples/benchmarks/state_layouts.py frontier

A model alone, nothing measured: steps of 20 billion weights on 48 nodes of Frontier. Rows are by the network cards of
a node that a ring over all devices uses, by microbatches, and by the seconds that a microbatch computes. They say how
many times as fast ZeRO++ and the three levels are as ZeRO-3, and the latter as the former, beside the published ratios;
`all` where the three are within 25 %. Messages are closed forms, one for each of the 44 layers, priced as collectives
that hide nothing: weights in int8 by ZeRO++, gradients in int4 by both. Codecs read and write memory once. With 8
operations for a weight and a token, at 40 % of the peak, 2,048 tokens take 4.3 s.
"""

import sys
import tempfile
from collections.abc import Mapping
from itertools import permutations, product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from autoddl.api import _finish as finish
from autoddl.capture.factory import Factory
from autoddl.core import graph as graphs
from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, Group, collective, parse_cluster
from autoddl.launch.rehearse import Rehearsal, rehearse
from autoddl.planner.candidates import Candidate
from autoddl.planner.mesh_search import search
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import task_of
from autoddl.pricing.space import Choice, Region

WIDTH, LAYERS, ROWS = 512, 3, 64
WEIGHTS = 4.0 * WIDTH * WIDTH * LAYERS
"""Bytes of all weights."""

LINKS = """
name: three-levels
device: {{name: quarter-core, kind: cpu, memory: 2 GB, bandwidth: 2.5 GB/s, peak: {{float32: 24 GFLOP/s}}}}
levels:
  - {{name: process, size: 1, bandwidth: 1 GB/s, latency: 60 us, topology: fully-connected}}
  - {{name: node, size: 2, bandwidth: {0} MB/s, latency: 100 us, efficiency: 0.97}}
  - {{name: rack, size: 2, bandwidth: {1} MB/s, latency: 100 us, shared_by: node, efficiency: 0.97}}
  - {{name: hall, size: 2, bandwidth: {2} MB/s, latency: 100 us, shared_by: rack, efficiency: 0.97}}
"""

PUBLISHED = 1.405, 2.398, 1.707
"""How many times as fast ZeRO++ is as ZeRO-3, three levels are as ZeRO-3, and as ZeRO++ (arXiv 2501.04266)."""

QUANTISED = ("gradients=int4", "weights=int8")

ROWS_OF: Mapping[str, tuple[str, tuple[int, int, int], tuple[str, ...]]] = {
    "data parallel": ("B B B", (0, 0, 0), ()),
    "ZeRO-1": ("S(0) S(0) S(0)", (0, 0, 0), ()),
    "ZeRO-2": ("S(0) S(0) S(0)", (1, 1, 1), ()),
    "ZeRO-3": ("S(0) S(0) S(0)", (2, 2, 2), ()),
    "hybrid shards (HSDP)": ("B B S(0)", (0, 0, 2), ()),
    "secondary copy": ("S(1) S(1) S(0)", (0, 0, 2), ()),
    "three-level partition": ("S(0) S(0) S(0)", (0, 1, 2), ()),
    "ZeRO++": ("S(1) S(0) S(0)", (0, 2, 2), QUANTISED),
    "three levels, coded": ("S(0) S(0) S(1)", (0, 1, 2), QUANTISED),
}
"""How states are stored on hall, rack and node, what is split there besides (`core.state_layouts`), and codecs."""


class Layers(nn.Module):
    """Layers without biases, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

    def example_inputs(self) -> tuple[Tensor]:
        """A batch."""
        return (torch.zeros(ROWS, WIDTH),)


def built() -> Layers:
    """The model."""
    return Layers()


def planned(cluster: Cluster, parts: int, stored: str, depths: tuple[int, ...], codecs: tuple[str, ...] = ()) -> Plan:
    """The plan that splits the batch everywhere and stores all weights so."""
    layout = Layout.parse(stored)

    def region(_: Graph, mesh: Mesh) -> Region:
        whole, rows = Layout.broadcast(mesh), Layout.parse(" ".join(["S(0)"] * len(mesh.axes)))

        def allowed(_: Graph, item: Op | graphs.Tensor, choice: Choice) -> bool:
            if isinstance(item, graphs.Tensor):
                return choice.outputs[0] == layout and choice.depths == depths
            return item.target != "aten.linear.default" or (choice.inputs[0] == rows and whole in choice.inputs)

        return allowed

    options = PlanOptions(mesh="hall=2,rack=2,node=2", microbatches=(parts,), compress=codecs)
    task = task_of(built(), cluster, None, options, "", None)
    return finish(task, search(task, [Candidate(Mesh.parse("hall=2,rack=2,node=2"), region, parts)]), 1, options)


def formulas(parts: int, stored: str, depths: tuple[int, ...], codecs: tuple[str, ...] = ()) -> dict[str, float]:
    """Bytes of a step over one uplink of every level, by the forms above."""
    states, axes, sent = Layout.parse(stored), ("hall", "rack", "node"), []
    weights, gradients = (1 / 4, 1 / 8) if codecs else (1.0, 1.0)
    for a in range(3):
        piece = WEIGHTS / 2 / 2 ** (2 - a)
        if states[a] == B:
            sent.append(2 * piece)
            continue
        gathers = parts * (2 * LAYERS - 1) / LAYERS if depths[a] == 2 else 1
        sent.append(piece * (gathers * weights + (parts if depths[a] else 1) * gradients))
    behind = {"hall": 4, "rack": 2, "node": 1}
    return {axis: behind[axis] * sum(sent[:a + 1]) for a, axis in enumerate(axes)}


def shown(name: str, parts: int, plan: Plan, found: Rehearsal, seconds: list[float]) -> str:
    """A row."""
    cells = []
    for level, nbytes in formulas(parts, *ROWS_OF[name]).items():
        up = next(one for one in found.uplinks if one.level == level)
        cells.append(f"{nbytes / 1e6:.3f} / {up.planned / 1e6:.3f} / {up.left / 1e6:.3f}")
    return f"| {name} | {' | '.join(cells)} | {plan.predicted.seconds:.2f} | {median(seconds):.2f} |"


def frontier() -> None:
    """Prints the ratios; weights are gathered in pairs, gradients reduced in nodes, by the three levels."""
    text = Path(__file__).parent.parent.joinpath("clusters", "frontier.yaml").read_text(encoding="utf-8")
    print("published: " + ", ".join(map(str, PUBLISHED)))
    for cards, shared in ((4, "package"), (1, "node")):
        third, plus, each, once = frontier_messages(parse_cluster(
            text.replace("size: 16", "size: 48").replace("shared_by: package", f"shared_by: {shared}"), "frontier"))
        for parts, compute in product((1, 4, 16), (0.1, 0.7, 2.0, 4.3)):
            a, b, c = (parts * (compute + sent) for sent in (third, plus, each + once / parts))
            found = a / b, a / c, b / c
            near = all(abs(one / other - 1) <= 0.25 for one, other in zip(found, PUBLISHED, strict=True))
            print(f"{cards} cards, {parts:2} microbatches that compute {compute} s: "
                  f"{', '.join(f'{one:.3f}' for one in found)}{'  all' * near}")


def frontier_messages(cluster: Cluster) -> tuple[float, float, float, float]:
    """Seconds of the messages of a microbatch of ZeRO-3, ZeRO++ and three levels, and of a step of the last besides."""
    size, layers = 2.0 * 20e9, 44
    every, node, pair, nodes, pairs = (Group((one,)) for one in ((384, 1), (8, 1), (2, 1), (48, 8), (192, 2)))

    def took(kind: str, group: Group, nbytes: float) -> float:
        return layers * collective(cluster, kind, group, nbytes / layers).seconds

    def copied(nbytes: float) -> float:
        return nbytes / cluster.device.bandwidth_of("elementwise", "bfloat16")

    third = 2 * took("all-gather", every, size) + took("reduce-scatter", every, size)
    reduced = copied(1.5 * size) + took("all-to-all", node, size / 4)
    plus = (took("all-gather", every, size / 2) + copied(1.5 * size) + took("all-gather", node, size)
            + reduced + took("all-to-all", nodes, size / 32))
    each = 2 * took("all-gather", pair, size) + reduced
    return third, plus, each, took("all-to-all", nodes, size / 32) + took("all-gather", pairs, size / 2)


def main(steps: int, wanted: str, rounds: int, parts: int, slower: float) -> None:
    """Plans every row with one of those in its name, and rehearses it, in rounds."""
    text = LINKS.format(*(rate / slower for rate in (50, 12.5, 3.125)))
    cluster = parse_cluster(text, "three-levels")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "three-levels.yaml")
        place.write_text(text)
        plans = {name: planned(cluster, parts, *row) for name, row in ROWS_OF.items()
                 if any(word in name for word in wanted.split(","))}
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        for name, plan in plans.items() if not rounds else ():
            print(f"{name}: {plan.predicted.seconds:.3f} s predicted, a rank sends "
                  f"{sum(plan.predicted.volume.values()) / 1e6:.3f} MB", flush=True)
        for _ in range(rounds):
            for name, plan in plans.items():
                file = Path(folder, "plan.json")
                plan.save(file)
                found = rehearse(file, plan, Factory(__file__, "built", {}), steps=steps)
                assert not found.collective_mismatches, name
                seconds[name] += found.step_seconds[1:]
                if len(seconds[name]) == rounds * (steps - 1):
                    print(shown(name, parts, plan, found, seconds[name]), flush=True)
        for one, other in permutations(plans if rounds else (), 2):
            if 1.25 * plans[one].predicted.seconds < plans[other].predicted.seconds:
                assert median(seconds[one]) < median(seconds[other]), f"{one} took longer than {other}"


if __name__ == "__main__":
    if sys.argv[1:] == ["frontier"]:
        frontier()
        sys.exit()
    given = [*sys.argv[1:], *("4", "", "3", "2", "1")[len(sys.argv) - 1:]]
    main(int(given[0]), given[1], int(given[2]), int(given[3]), float(given[4]))
