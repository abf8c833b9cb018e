"""What runs between two messages is compiled: the same losses and gradients, the same messages, fewer calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from precise import Precise
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError, MachineError
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import SELECTIVE, blocks_of, recompute_entry
from autoddl.launch.check import mismatches
from autoddl.operators.fusion import as_compiled
from autoddl.runtime import parallelize as module_of_parallelize
from autoddl.runtime.compiled import COMPUTES, EARLY, compile_stretches, compiler
from autoddl.runtime.parallelize import parallelize

TRACED = "aot_eager"
"""A backend of torch.compile that traces forward and backward, and compiles nothing."""


def built(name: str) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    module, sample = zoo.named(name, B=8, dtype=torch.float64)
    return Precise(module), sample


@shared
def captured(name: str) -> Captured:
    return capture(*built(name))


def trained(name: str, plan: Plan, compile: bool | str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses of two steps with SGD, the parameters after them, and what was not sent as planned."""
    module, sample = built(name)
    parallel = parallelize(module, plan, sample, captured=captured(name), compile=compile)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    for _ in range(2):
        losses.append(float(parallel.step(sample)))
        optimizer.step()
        optimizer.zero_grad()
    whole = {key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
             for key, p in parallel.named_parameters()}
    return losses, whole, mismatches(parallel)


def differences(name: str, plans: list[Plan]) -> list[tuple[float, list[str]]]:
    """How losses and parameters of each plan differ when it is compiled, and what it did not send as planned."""
    found = []
    for plan in plans:
        losses, parameters, _ = trained(name, plan, False)
        others, theirs, missing = trained(name, plan, TRACED)
        worst = max([abs(a - b) for a, b in zip(losses, others, strict=True)]
                    + [float((parameters[key] - theirs[key]).abs().max()) for key in parameters])
        found.append((worst, missing))
    return found


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["a=2"], ["a=2,b=2"])
def test_compiled_plans_train_alike_and_send_the_same(mesh: str) -> None:
    name = "gpt" if "b" in mesh else "gpt-1"
    module, sample = built(name)
    made = captured(name)
    roles = dict(zip(("a", "b"), ("zero", "tensor"), strict=True)) if "b" in mesh else {"a": "zero"}
    zero, = random_plans(module, sample, mesh, 1, roles=roles, regather=True, captured=made)
    anywhere, = random_plans(module, sample, mesh, 1, seed=3, captured=made)
    last = [block.name for block in blocks_of(add_hubs(made.graph))][-1]
    again = replace(zero, recompute=(recompute_entry(last, SELECTIVE),))
    for ranks in on_ranks(zero.mesh.size, differences, name, [again, anywhere] if "b" in mesh else [again]):
        for worst, missing in ranks:
            assert worst < 1e-12
            assert not missing


def test_a_program_without_messages_is_one_stretch() -> None:
    module, sample = zoo.gpt()
    plan = autoddl.plan(module, cluster_of("core=1"), sample, precision="bf16-mixed")
    parallel = parallelize(module, plan, sample, device="cpu", compile=TRACED)
    calls = [node.name for node in parallel.runners()[0].free[0].lowered.program.graph.nodes
             if node.op == "call_function" and not node.name.startswith(("use_", "getitem"))]
    assert calls == ["compiled_0"]


def graph_of(*kinds: str) -> tuple[fx.Graph, list[fx.Node]]:
    """x, then a call after the other: one that `computes`, an `early` one of x, or a message."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    x = last = graph.placeholder("x")
    for kind in kinds:
        node = graph.call_function(torch.sin, (x if kind == "early" else last,))
        node.meta |= {"computes": {COMPUTES: True}, "early": {EARLY: True}, "message": {}}[kind]
        last = last if kind == "early" else node
        nodes.append(node)
    graph.output((last, nodes[0]))
    return graph, nodes


def run_with(graph: fx.Graph, cuts: set[fx.Node]) -> tuple[list[int], Any]:
    """How many calls each stretch has, and the results of the program with its stretches."""
    sizes = []

    def compile_stretch(stretch: fx.GraphModule) -> Any:
        sizes.append(sum(node.op == "call_function" for node in stretch.graph.nodes))
        return lambda *values: stretch(*values)

    compile_stretches(graph, cuts, compile_stretch)
    graph.lint()
    return sizes, fx.GraphModule(nn.Module(), graph)(torch.ones(()))


def test_stretches_end_at_messages_and_cuts_and_early_calls_move_before_them() -> None:
    kinds = ("computes", "computes", "early", "computes", "message", "computes", "message", "computes", "computes",
             "computes", "computes")
    _, expected = run_with(graph_of(*kinds)[0], set())
    graph, nodes = graph_of(*kinds)
    sizes, found = run_with(graph, {nodes[9]})
    assert sizes == [3, 2, 2]
    assert found == expected


def test_a_plan_runs_compiled_where_it_was_priced_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(backend: str) -> Any:
        asked.append(backend)
        return compiler(TRACED)

    monkeypatch.setattr(module_of_parallelize, "compiler", noted)
    for cluster in (cluster_of("core=1"), as_compiled(cluster_of("core=1"))):
        module, sample = zoo.regression()
        parallelize(module, autoddl.plan(module, cluster, sample), sample, device="cpu")
    assert asked == ["inductor"]


def test_a_compiler_that_is_not_there_is_one_line() -> None:
    with pytest.raises(InputError, match=r"no_such_backend.*compile=False"):
        compiler("no_such_backend")


def test_a_compiler_that_fails_is_one_line() -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    graph, _ = graph_of("computes", "computes")
    run = compiler(breaks)(fx.GraphModule(nn.Module(), graph))
    with pytest.raises(MachineError, match=r"torch\.compile fails here: .*compile=False, or plan without --compiled"):
        run(torch.ones(()))
