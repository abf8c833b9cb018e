"""Plans chosen for their time line: never a longer one, and a bound that no plan's time line is below."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from random_plans import random_plan
from sampling import parametrize_or_slow
from shell import FACTORY, shell
from tiny import tiny
from torch import Tensor, nn

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import Cluster, load_cluster
from autoddl.planner.question import rebuild
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables
from autoddl.schedule.timeline import predict_timeline

CLUSTERS = Path(__file__).parent.parent.parent / "examples" / "clusters"
FLAT, PAIRS = CLUSTERS / "rehearsal-4x1-200.yaml", CLUSTERS / "rehearsal-2x2-200.yaml"


@cache
def captured(layers: int = 2) -> Captured:
    return capture(tiny(layers, batch=64))


def line(plan: Plan, cluster: Cluster, layers: int = 2) -> float:
    graph = add_hubs(captured(layers).graph)
    return predict_timeline(plan, graph, cluster).step.seconds + plan.predicted.update


@parametrize_or_slow("place,layers", [(FLAT, 1)], [(FLAT, 2), (PAIRS, 2)])
def test_never_a_longer_line(place: Path, layers: int, tmp_path: Path) -> None:
    model, cluster = tiny(layers, batch=64), load_cluster(place)
    plain, best = autoddl.plan(model, cluster), autoddl.plan(model, cluster, overlap=True)
    seconds, bound = best.predicted.line_seconds, best.predicted.line_bound
    assert plain.predicted.line_seconds is None and seconds is not None and bound is not None
    assert seconds == pytest.approx(line(best, cluster, layers)) and seconds <= line(plain, cluster, layers)
    assert 0 < bound <= seconds
    assert best.bound == pytest.approx(plain.bound) and best.bound <= best.predicted.seconds
    assert rebuild(best).problem.cost(rebuild(best).choice) == pytest.approx(best.predicted.seconds)
    best.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").predicted == best.predicted


@parametrize_or_slow("seed", range(3), range(3, 8))
@pytest.mark.parametrize("place", [FLAT, PAIRS])
def test_no_line_is_below_what_is_waited_for(place: Path, seed: int) -> None:
    """What is computed and waited for at once, with nothing of parameters', bounds the time line of any plan."""
    cluster = load_cluster(place)
    mesh = random.Random(seed).choice([m for m in ("net=4", "net.1=2,net.0=2") if place == FLAT] or ["net=2,node=2"])
    plan = random_plan(captured(), seed, mesh, cluster)
    graph = add_hubs(captured().graph)
    pricing = Pricing(graph, Mesh.parse(mesh), cluster, hidden=1.0)
    space = variables(graph, pricing.mesh)
    stored = {s.fqn: (s.layout, s.regather) for s in plan.stored}
    decided = {d.name: (d.inputs, d.outputs) for d in plan.decisions}
    choice = [next(k for k, c in enumerate(v.choices) if (stored[v.name] == (c.outputs[0], c.regather)
                   if v.name in stored else decided[v.name] == (c.inputs, c.outputs))) for v in space]
    problem = problem_of(pricing, space, None)
    assert problem.cost(choice) <= predict_timeline(plan, graph, cluster).step.seconds * (1 + 1e-9)


def test_hidden_seconds_are_those_of_parameters() -> None:
    """The price falls with what is hidden, and keeps what forbids."""
    graph = add_hubs(capture(tiny(), None).graph)
    mesh, cluster = Mesh.parse("net=4"), load_cluster(FLAT)
    space = variables(graph, mesh)
    choice = [len(v.choices) - 1 for v in space]
    costs = [problem_of(Pricing(graph, mesh, cluster, hidden=h), space, None).cost(choice) for h in (0.0, 0.5, 1.0)]
    assert costs[1] == pytest.approx((costs[0] + costs[2]) / 2)


def test_an_interrupt_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    model, cluster = tiny(batch=64), load_cluster(FLAT)
    monkeypatch.setattr("autoddl.planner.overlap.search", interrupted)
    plain, best = autoddl.plan(model, cluster), autoddl.plan(model, cluster, overlap=True)
    seconds, bound = best.predicted.line_seconds, best.predicted.line_bound
    assert best.decisions == plain.decisions and seconds is not None and bound is not None
    assert 0 < bound <= seconds == pytest.approx(line(plain, cluster))


def test_an_interrupt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoddl.planner.overlap.search", interrupted)
    assert autoddl.plan(tiny(batch=64), load_cluster(FLAT), overlap=True).proof.endswith("; interrupted")


class Other(nn.Module):
    """With two rows it is another model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.tanh() if x.shape[0] == 2 else y).square().mean()  # type: ignore[no-any-return]


def test_a_number_of_microbatches_that_was_guessed_wrongly_is_passed_over() -> None:
    model, x = Other(), torch.zeros(8, 16)
    plan = autoddl.plan(model, FLAT, x, mesh="net=4", overlap=True, microbatches=(1, 2, 4))
    assert plan.microbatches in (1, 2) and plan.predicted.line_seconds is not None


def test_shell() -> None:
    said = shell("plan", FACTORY, str(FLAT), "--set", "layers=0", "--overlap", "--json")
    assert said.code == 0, said.err
    out = json.loads(said.out)
    rounded = 1 + 1e-12
    assert out["line_bound_seconds"] <= out["line_seconds"] * rounded <= out["predicted_seconds"] * rounded**2
    with pytest.raises(InputError):
        autoddl.plan(tiny(), FLAT, mesh="net=3", overlap=True)
