"""Problems of real graphs: hubs count once, parts add up, and the exact search equals looking at every choice."""

from dataclasses import replace
from math import inf, prod

import pytest
import torch
import zoo
from planmaker import random_plans
from random_plans import LAPTOP, random_plan
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.core.graph import Kind
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.problem import Problem
from autoddl.cost_models import load_cluster
from autoddl.operators.trials.cases import case
from autoddl.operators.work import KernelWork, work
from autoddl.planner.assemble import assemble
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable, variables
from autoddl.schedule.buckets import gather_buckets, gradient_buckets, parameter_edges
from autoddl.schedule.traffic import traffic
from autoddl.search import solve


class Chain(nn.Module):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.up(x).relu()).sum()
        return loss


class Fork(nn.Module):
    """One layer whose result is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        return (y + y.relu()).sum()


def _problem(model: nn.Module, mesh: str, rows: int, budget: float | None = None
             ) -> tuple[Pricing, tuple[Variable, ...], Problem]:
    width = next(model.parameters()).shape[1]
    graph = add_hubs(capture(model, (torch.zeros(rows, width),)).graph)
    pricing = Pricing(graph, Mesh.parse(mesh), load_cluster(LAPTOP))
    space = variables(graph, pricing.mesh)
    return pricing, space, problem_of(pricing, space, budget)


CASES = [(Chain, "all=4", rows) for rows in (4, 64, 4096)] + [(Fork, "all=4", rows) for rows in (4, 512)] + [
    (Fork, "machine=2,pair=2", 64)]


@pytest.mark.parametrize(("model", "mesh", "rows"), CASES)
def test_exact_equals_exhaustive_on_real_graphs(model: type[nn.Module], mesh: str, rows: int) -> None:
    _, _, problem = _problem(model(), mesh, rows)
    if torch.tensor(problem.sizes, dtype=torch.float64).prod() > 4e6:
        pytest.skip(f"{problem.sizes} is too much to look at")
    free = solve(problem)
    assert free.is_optimal and free.seconds == pytest.approx(solve(problem, "exhaustive").seconds, rel=1e-12)
    least = solve(replace(problem, budget=free.nbytes)).nbytes
    for share in (0.5, 0.75, 0.9):
        tight = replace(problem, budget=share * least)
        found, truth = _outcome(tight, "exact"), _outcome(tight, "exhaustive")
        assert found == pytest.approx(truth, rel=1e-9), f"at {share} of the bytes"


def _outcome(problem: Problem, solver: str) -> float:
    from autoddl.core.errors import Infeasible

    try:
        return solve(problem, solver).seconds
    except Infeasible as error:
        return -error.needed


def test_a_shared_tensor_passes_one_hub() -> None:
    graph = add_hubs(capture(Fork(), (torch.zeros(8, 128),)).graph)
    hubs = [op for op in graph.ops if op.target == HUB]
    assert len(hubs) == 1
    readers = [op.name for op in graph.ops if hubs[0].outputs[0] in op.inputs]
    assert len(readers) == 2
    uses = graph.consumers()
    assert all(len(uses[t]) <= 1 for t in graph.dependent() if t != hubs[0].outputs[0])


def test_the_charge_holds_the_batch_of_all_microbatches() -> None:
    pricing, space, one = _problem(Chain(), "all=4", 8)
    four = problem_of(replace(pricing, microbatches=4), space, None)
    (batch,) = (t.nbytes for t in pricing.graph.tensors if t.kind is Kind.INPUT)
    assert one.fixed_bytes == batch == 8 * 64 * 4 and four.fixed_bytes == 4 * batch


def test_dead_ops_and_unused_outputs_are_not_planned() -> None:
    class Wasteful(Fork):
        def forward(self, x: Tensor) -> Tensor:
            self.one(x).exp()
            return super().forward(x)

    assert not any("exp" in op.target for op in add_hubs(capture(Wasteful(), (torch.zeros(8, 128),)).graph).ops)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(*zoo.gpt())


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_of_a_plan_add_up(captured: Captured, seed: int) -> None:
    plan = random_plan(captured, seed)
    predicted = plan.predicted
    parts = predicted.compute, predicted.update, *predicted.communication.values()
    assert predicted.seconds == pytest.approx(sum(parts), rel=1e-12)
    assert 0 < predicted.compute < inf
    assert plan.gap == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_buckets_hold_every_parameter_once_and_keep_to_their_size(captured: Captured, seed: int) -> None:
    plan, graph = random_plan(captured, seed), add_hubs(captured.graph)
    plan = replace(plan, bucket_bytes=3000)
    edges = parameter_edges(plan, graph)
    trained = {e.tensor.fqn for e in edges if any(s.kind not in ("slice", "fill") for s in e.backward)}
    buckets = gradient_buckets(plan, graph)
    members = [fqn for bucket in buckets for fqn in bucket.members]
    assert len(members) == len(set(members)) and set(members) == trained
    sizes = {t.fqn: t.nbytes for t in graph.tensors if t.kind is Kind.PARAMETER}
    assert all(len(b.members) == 1 or sum(sizes[m] for m in b.members) <= 4 * 3000 for b in buckets)
    gathered = [fqn for bucket in gather_buckets(plan, graph) for fqn in bucket.members]
    assert len(gathered) == len(set(gathered))


def test_smaller_buckets_send_the_same_bytes_in_more_collectives(captured: Captured) -> None:
    plan, graph = random_plan(captured, 1), add_hubs(captured.graph)
    few, many = traffic(plan, graph), traffic(replace(plan, bucket_bytes=1), graph)
    assert sum(s.nbytes for s in few) == sum(s.nbytes for s in many)
    assert len(few) < len(many)


def test_a_problem_whose_parts_disagree_is_refused(captured: Captured) -> None:
    graph = add_hubs(captured.graph)
    pricing = Pricing(graph, Mesh.parse("all=4"), load_cluster(LAPTOP))
    space = variables(graph, pricing.mesh)
    problem = problem_of(pricing, space, None)
    solution = solve(problem)
    with pytest.raises(AssertionError, match="add up"):
        assemble(pricing, replace(solution, seconds=solution.seconds * 1.01), space)


class Codes(nn.Module):
    """The nearest row of a table, and a teacher: nothing flows back to distances, nor through the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.near = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.codes = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.student(x)
        code = self.codes[(self.near(y) @ self.codes.T).argmin(1)]
        return F.mse_loss(y, code) + F.mse_loss(y, self.teacher(y).detach())


def test_no_gradient_is_planned_where_the_loss_asks_for_none() -> None:
    sample = (torch.zeros(8, 16),)
    graph = add_hubs(capture(Codes(), sample).graph)
    for made in random_plans(Codes(), sample, "node=4", 20, regather=True, microbatches=2):
        flows = {edge.tensor.fqn: edge.conversion.gradient is not None for edge in parameter_edges(made, graph)}
        assert flows == {"student.weight": True, "codes": True, "near.weight": False, "teacher.weight": False}
        reduced = {fqn for bucket in gradient_buckets(made, graph) for fqn in bucket.members}
        again = {fqn for bucket in gather_buckets(made, graph) if bucket.regather for fqn in bucket.members}
        assert not (reduced | again) & {"near.weight", "teacher.weight"}


def kernels_of(target: str, *args: object) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    """Forward and backward of an op, all of whose inputs have gradients."""
    one = case(target, *args)
    inputs, outputs = (tuple(t.shape for t in tensors) for tensors in (one.inputs, one.outputs))
    return work(one.op, one.graph, inputs, outputs, frozenset(range(len(one.graph.tensors))))


def of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(("equation", "shapes", "dims"), [
    ("ij,kj->ik", ((5, 6), (7, 6)), (1, 5, 7, 6)), ("bik,bkj->bij", ((3, 5, 6), (3, 6, 7)), (3, 5, 7, 6)),
    ("...ij,jk", ((2, 5, 6), (6, 7)), (1, 10, 7, 6)), ("...hi, ...ih -> ...", ((4, 5, 6), (4, 6, 5)), (4, 1, 1, 30)),
    ("ij,jk->k", ((5, 6), (6, 7)), (1, 1, 7, 6)), ("ij,jk,kl->il", ((4, 5), (5, 6), (6, 7)), (1, 4, 7, 30))])
def test_an_einsum_is_a_product_of_its_letters(equation: str, shapes: tuple[tuple[int, ...], ...],
                                               dims: tuple[int, ...]) -> None:
    (forward,), backward = kernels_of("aten.einsum.default", equation, of(*shapes))
    assert (forward.kind, forward.shape, forward.flops) == ("matmul", dims, 2 * prod(dims))
    assert [one.flops for one in backward] == [forward.flops] * len(shapes)


def test_an_einsum_costs_what_the_product_does_that_it_writes() -> None:
    assert kernels_of("aten.einsum.default", "ij,jk->ik", of((5, 6), (6, 7))) == kernels_of(
        "aten.mm.default", *of((5, 6), (6, 7)))
    for equation, shapes in (("ij->ji", ((5, 6),)), ("ij,ij->ij", ((5, 6), (5, 6))), ("i,j->ij", ((5,), (6,)))):
        assert all(one.kind == "memory" for ones in kernels_of("aten.einsum.default", equation, of(*shapes))
                   for one in ones), equation


@pytest.mark.parametrize(("target", "shapes", "groups", "flops"), [
    ("aten.conv_transpose1d.default", ((5, 6, 9), (6, 7, 3)), 1, 2 * 5 * 6 * 9 * 7 * 3),
    ("aten.conv_transpose2d.input", ((2, 6, 4, 4), (6, 3, 2, 2)), 6, 2 * 2 * 6 * 16 * 3 * 4),
    ("aten.conv_transpose3d.input", ((6, 4, 4, 4), (6, 3, 2, 2, 2)), 1, 2 * 6 * 64 * 3 * 8)])
def test_a_transposed_convolution_writes_a_kernel_for_every_element_that_it_reads(
        target: str, shapes: tuple[tuple[int, ...], ...], groups: int, flops: int) -> None:
    ones = (1,) * (len(shapes[1]) - 2)
    (forward,), backward = kernels_of(target, *of(*shapes), None, ones, [0 for _ in ones], [0 for _ in ones], groups)
    assert (forward.kind, forward.flops) == ("convolution", flops)
    assert [one.flops for one in backward] == [flops, flops]
