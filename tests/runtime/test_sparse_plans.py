"""Plans whose gradients add up sparse run on ranks: what they send and keep is the whole gradient, and ranks agree."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import zoo
from random_plans import random_plan
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, as_sample, parted
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.core.sparse import SparseRule
from autoddl.cost_models import parse_cluster
from autoddl.launch.check import mismatches
from autoddl.planner.options import PlanOptions
from autoddl.runtime.checkpoints import checkpoint, residual_state
from autoddl.runtime.collectives.sparse_sum import SparseSum
from autoddl.runtime.guards import guard_optimizers
from autoddl.runtime.parallelize import ParallelModel, parallelize

SLOW = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 100 GB/s, peak: {float32: 1 TFLOP/s, bfloat16: 1 TFLOP/s}}
levels: [{name: all, size: 4, bandwidth: 1 MB/s, latency: 1 us}]
"""
STEPS = 3
REMEDIED = "0.05,warmup=1,falls=4,momentum=0.9"


def model() -> tuple[nn.Module, Sample]:
    return zoo.gpt(B=8, layers=1)


@shared
def _captured(parts: int) -> Captured:
    module, sample = model()
    return capture(module, parted(as_sample(sample), parts))


def plan_of(seed: int, parts: int, mesh: str | None = None, rule: str = "0.05") -> Plan:
    return random_plan(_captured(parts), seed, mesh, parse_cluster(SLOW, "slow"), parts, sparse=rule)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's piece of the gradient."""
    assert parameter.grad is not None
    piece: torch.Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return piece


def _on_a_rank(plan: Plan, parts: int) -> dict[str, object]:
    """Of some steps whose gradients add up: mismatches, what was lost, and gradients by parameter and piece of it."""
    captured, batch = _captured(parts), as_sample(model()[1])
    sparse, whole = (parallelize(model()[0], one, captured=captured)
                     for one in (plan, plan.without_codecs()))
    wrong, fits = list[str](), True
    for _ in range(STEPS):
        sparse.step(batch)
        whole.step(batch)
        wrong += mismatches(sparse)
        fits &= all(one.fits for one in sparse.recorder.sparse)
    sums, lost, most, gradients = len(sparse.recorder.sparse), 0.0, 0.0, dict(whole.named_parameters())
    left = {name: sum(one.summed() for one in many) for name, many in sparse.residuals().items()}
    for name, parameter in sparse.named_parameters():
        if parameter.grad is not None:
            piece = local(gradients[name])
            found = local(parameter) + left.get(name, 0.0)
            lost, most = max(lost, float((found - piece).abs().max())), max(most, float(piece.abs().max()))
    alike = {(name, *sparse.piece(name)): local(parameter) for name, parameter in sparse.named_parameters()
             if parameter.grad is not None}
    return {"wrong": wrong, "sums": sums, "lost": lost / most, "fits": fits, "alike": alike}


@pytest.mark.ranks
@parametrize_or_slow("seed,parts,mesh", [(1, 2, "machine=2,pair=2")], [(2, 1, "b=2,a=2"), (0, 1, None)])
def test_a_sparse_plan_sends_and_keeps_the_whole_gradient(seed: int, parts: int, mesh: str | None) -> None:
    """Whatever else is split: in parts of the mesh sums may be whole, and pieces of a gradient may be sparse."""
    plan = plan_of(seed, parts, mesh)
    assert plan.sparse_sums and not plan.codecs and not plan.without_codecs().sparse_sums
    found = on_ranks(4, _on_a_rank, plan, parts)
    for one in found:
        assert one["wrong"] == [] and one["fits"] and one["sums"]
        assert isinstance(one["lost"], float) and one["lost"] < 1e-6
    first: dict[object, torch.Tensor] = {}
    for one in found:
        assert all(torch.equal(g, first.setdefault(at, g)) for at, g in one["alike"].items()), "copies are the same"


def test_momentum_of_sums_and_of_the_optimizer_together_are_refused() -> None:
    with pytest.raises(InputError, match=r"sums velocities.*sgd-momentum has a momentum of its own: take sgd"):
        PlanOptions(sparse="0.1,momentum=0.9", optimizer="sgd-momentum")
    assert PlanOptions(sparse="0.1,momentum=0.9", optimizer="sgd").sparse == "0.1,momentum=0.9"
    owner, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    guard_optimizers(owner, [weight], 0.9)
    weight.grad = torch.ones(2)
    for optimizer in (torch.optim.SGD([weight], 0.1), torch.optim.AdamW([weight])):
        optimizer.step()
    torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9).step()
    with pytest.raises(InputError, match=r"sparse sums have a momentum of 0.9, and SGD one of 0.8.*give it momentum=0"):
        torch.optim.SGD([weight], 0.1, momentum=0.8).step()


def test_a_model_alone_has_no_residual() -> None:
    captured = _captured(1)
    plan = random_plan(captured, 0, "all=1", parse_cluster(SLOW.replace("size: 4", "size: 1"), "one"), sparse="0.05")
    alone: ParallelModel = parallelize(model()[0], plan, captured=captured)
    alone.step(as_sample(model()[1]))
    assert alone.residuals() == {}


def _trained(parallel: ParallelModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(parallel.step(as_sample(model()[1])).item())
        optimizer.step()
    return losses


def _started(plan: Plan) -> tuple[ParallelModel, torch.optim.Optimizer]:
    parallel = parallelize(model()[0], plan, captured=_captured(1))
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def _unsent(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """By parameter, the sum of all ranks' residuals: whole, wherever its pieces are."""
    found = {}
    for name, (one,) in sorted(parallel.residuals().items()):
        shape = next(t.shape for t in parallel.graph.tensors if t.fqn == name)
        whole, piece = torch.zeros(shape), one.summed()
        into = whole
        for dim, (offset, size) in enumerate(parallel.piece(name)):
            into = into.narrow(dim, offset, size)
        into.copy_(piece)
        dist.all_reduce(whole, dist.ReduceOp.MAX)  # pieces of one place are equal, the others are 0 ...
        least = torch.zeros(shape)
        into = least
        for dim, (offset, size) in enumerate(parallel.piece(name)):
            into = into.narrow(dim, offset, size)
        into.copy_(piece)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        found[name] = whole + least * (whole == 0)
    return found


def _saved_and_resumed(plan: Plan, other: Plan, folder: str) -> dict[str, object]:
    """Of a run that goes on from a checkpoint: whether its bits are those of the run, and what another plan gets."""
    first = _started(plan)
    _trained(*first, 2)
    checkpoint.save(*first, f"{folder}/saved")
    before = _unsent(first[0])
    second = _started(plan)
    checkpoint.load(*second, f"{folder}/saved")
    kept = [(a.values, b.values) for name, many in first[0].residuals().items()
            for a, b in zip(many, second[0].residuals()[name], strict=True)]
    kept += [(a.move.sparse.velocity, b.move.sparse.velocity) for name, many in first[0].residuals().items()
             for a, b in zip(many, second[0].residuals()[name], strict=True)
             if a.move.sparse is not None and b.move.sparse is not None]
    same = bool(kept) and all(torch.equal(a, b) for a, b in kept) and any(bool(a.any()) for a, _ in kept)
    losses = _trained(*first, 3), _trained(*second, 3)
    equal = all(torch.equal(local(a), local(b)) for a, b in zip(first[0].parameters(), second[0].parameters(),
                                                               strict=True))
    two = _started(other)[0]
    checkpoint.load(two, None, f"{folder}/saved")
    after = _unsent(two)
    lost = [float((before[name] - after[name]).abs().max() / before[name].abs().max().clamp_min(1e-30))
            for name in before.keys() & after.keys()]
    two.step(as_sample(model()[1]))
    falls = [sent.renewed and not sent.whole for sent in two.recorder.sparse]
    return {"same": same, "equal": equal, "losses": losses[0] == losses[1], "lost": max(lost), "both": len(lost),
            "falls": bool(falls) and all(falls)}


@pytest.mark.parametrize(("bounds", "fits"), [([2, 4, 9], True), ([2, 4, 11], False), ([2, 4], False), ([], False)])
def test_thresholds_of_another_bucket_are_computed_again(bounds: list[int], fits: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    state = SparseSum(SparseRule.parse("0.1"), 4, 0, torch.zeros(10))
    piece = residual_state._Piece("residuals.p.0.0.w", "w", {"values": state.residual}, ((0, 10),), True)
    monkeypatch.setattr(residual_state, "_sums", lambda parallel: [residual_state._Sum(state, (piece,), True)])
    read = {f"{piece.key}.values": torch.ones(10), f"{piece.key}.thresholds": torch.tensor([1.0, 2.0, 5.0, *bounds])}
    residual_state.restore_residuals(Mock(), read)
    assert state.bounds == (bounds if fits else []) and state.steps == 5 and bool(state.residual.all())


@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit_and_another_plan_gets_what_was_not_sent(tmp_path: Path) -> None:
    for found in on_ranks(4, _saved_and_resumed, plan_of(0, 1, rule=REMEDIED), plan_of(2, 1, "b=2,a=2", REMEDIED),
                          str(tmp_path)):
        assert found["same"] and found["equal"] and found["losses"]
        assert found["falls"], "another plan computes thresholds, and its share falls on"
        assert isinstance(found["lost"], float) and found["lost"] < 1e-6 and found["both"]
