"""A plan says where switches add up its sums, in its file and its tables, and why they do not elsewhere."""

import json

import pytest
import torch
from torch import nn

import autoddl
from autoddl.core.plan import Plan, parse_plan
from autoddl.cost_models import parse_cluster
from autoddl.explain.compare_run import foreseen, graph_of_plan
from autoddl.explain.explain import proved
from autoddl.explain.message_sizes import message_rows
from autoddl.explain.switch_facts import not_offered, switch_texts
from autoddl.schedule.uplink_bytes import count_uplink_bytes

TEXT = """name: switched
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 5 GB/s, peak: {float32: 50 GFLOP/s}}
levels:
  - {name: node, size: 1, bandwidth: 1 GB/s, latency: 60 us}
  - {name: net, size: 4, bandwidth: 10 MB/s, latency: 100 us%s}
"""


class Two(nn.Module):
    """Two matrices and a loss that is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.down(torch.relu(self.up(x))), torch.zeros_like(x))


WEIGHTS = 4 * 2 * 256 * 512


def planned(reduces: str = "", mine: str | None = None) -> Plan:
    cluster = parse_cluster(TEXT % (f", reduces: {reduces}" if reduces else ""), "switched")
    return autoddl.plan(Two(), cluster, (torch.zeros(8192, 256),), mine=mine, workers=1)


def test_a_plan_through_switches_sends_each_gradient_once_and_says_so_everywhere() -> None:
    plan, ring = planned("true", "dp=4"), planned(mine="dp=4")
    (axis,) = plan.predicted.in_switches
    sent = WEIGHTS + 4  # gradients and the loss
    assert plan.predicted.in_switches[axis] == plan.predicted.volume[axis] == sent
    assert ring.predicted.volume[axis] == 1.5 * sent and not ring.predicted.in_switches
    rows = message_rows(plan)
    assert {row.algorithm for row in rows} == {("switch tree", None)}
    assert sum(row.moved[0] for row in rows) == sent
    assert count_uplink_bytes(plan, graph_of_plan(plan), [range(k, k + 1) for k in range(4)]) == (sent,) * 4
    assert plan.predicted.seconds < ring.predicted.seconds and foreseen(plan).step.seconds < foreseen(ring).step.seconds
    assert "in_switches" not in json.loads(ring.to_json())["predicted"]
    assert parse_plan(plan.to_json(), "again").predicted == plan.predicted


def test_the_search_takes_switches_and_a_certificate_covers_them() -> None:
    plan, ring = planned("true"), planned()
    assert plan.bound <= plan.predicted.seconds < ring.bound
    assert proved(plan).bound == pytest.approx(plan.bound, rel=1e-6)


def test_a_switch_without_room_falls_back_to_the_ring_and_the_plan_says_why() -> None:
    small, ring = planned("{memory: 300 kB}", "dp=4"), planned(mine="dp=4")
    assert small.predicted == ring.predicted
    (text,) = switch_texts(small)
    assert text.startswith("all-reduces over ") and text.endswith(
        "do not run in switches: a switch of level net has 300 kB for blocks, and 2 of 65.5 kB from 4 children take "
        "524 kB")
    assert "run in the switches of level net" in switch_texts(planned("true", "dp=4"))[0]
    assert switch_texts(ring) == () and not_offered(ring) == ""
    assert not_offered(small, ["net"]) == ""
    assert not_offered(small) == "no switch of level net reduces here: rings take their place"
