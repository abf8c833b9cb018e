"""A step in microbatches is the step of the whole batch: loss, gradients, training, what is sent, what is held.

Float64, models whose loss is a mean over rows that all count, plans of every strategy and random ones.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from planmaker import random_plans
from precise import Precise
from random_plans import random_plan
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.launch.check import mismatches
from autoddl.runtime.parallelize import MeshModel, ParallelModel, parallelize
from autoddl.schedule.traffic import traffic

STEPS = 3
ROWS = 8
MESH = "a=2,b=2"
STRATEGIES = {"data": ("data", "data", None), "zero kept": ("zero", "zero", False),
              "zero regathered": ("zero", "zero", True), "tensor x data": ("data", "tensor", None),
              "tensor x zero": ("zero", "tensor", True)}
"""The roles of axes a and b, and whether parameters are gathered again."""


def built(name: str, rows: int = ROWS) -> tuple[nn.Module, Sample]:
    module, sample = zoo.named(name, B=rows, dtype=torch.float64)
    return Precise(module), sample


@shared
def captured(name: str, microbatches: int) -> Captured:
    module, sample = built(name)
    return capture(module, parted(sample, microbatches))


def plans_of(name: str, microbatches: int, strategy: str, mesh: str = MESH) -> Plan:
    module, sample = built(name)
    first, second, regather = STRATEGIES[strategy]
    roles = {"a": first, "b": second} if "b" in mesh else {"a": first}
    return random_plans(module, parted(sample, microbatches), mesh, 1, roles=roles, regather=regather,
                        microbatches=microbatches, captured=captured(name, microbatches))[0]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(step: Any, module: nn.Module) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of every step, gradients of the first, parameters after the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, gradients = [], dict[str, Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))
        gradients = gradients or {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, {n: whole(p) for n, p in module.named_parameters()}


@shared
def truth(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The user's own module in one process, on the whole batch at once."""
    module, sample = built(name)

    def step() -> Tensor:
        loss: Tensor = module(*sample.args, **sample.kwargs)
        loss.backward()
        return loss.detach()

    return trained(step, module)


def held(parallel: ParallelModel) -> list[str]:
    """What the store still holds of gathered values and of gradients that are not reduced."""
    assert isinstance(parallel, MeshModel)
    store = parallel.runner.store
    found = [f"value of bucket {b}" for b, bucket in enumerate(store.gathers._buckets) if bucket.values or bucket.again]
    found += [f"local value of {fqn}" for fqn, local in store._locals.items() if local.value is not None]
    return found + [f"gradient of bucket {b}" for b, bucket in enumerate(store.reducer._buckets)
                    if any(tensor is not None for tensor in bucket.tensors)]


def case(name: str, plan: Plan) -> dict[str, Any]:
    """One rank's largest errors against one process and the whole batch, and what is wrong with what it did."""
    module, sample = built(name)
    parallel = parallelize(module, plan, captured=captured(name, plan.microbatches))
    batch = parallel.local_batch(sample.kwargs or sample.args)
    losses, gradients, state = trained(lambda: parallel.step(batch), module)
    true_losses, true_gradients, true_state = truth(name)
    assert gradients.keys() == true_gradients.keys() and state.keys() == true_state.keys()
    largest = max(float(g.abs().max()) for g in true_gradients.values())
    return {"loss": max(abs(a - b) / abs(b) for a, b in zip(losses, true_losses, strict=True)),
            "gradient": max(float((gradients[n] - g).abs().max()) for n, g in true_gradients.items()) / largest,
            "state": max(float((state[n] - p).abs().max()) for n, p in true_state.items()),
            "mismatches": mismatches(parallel), "held": held(parallel)}


def check(name: str, plan: Plan) -> None:
    truth(name)
    for rank, result in enumerate(on_ranks(plan.mesh.size, case, name, plan)):
        at = f"{name} on {plan.mesh} in {plan.microbatches}, rank {rank}: {result}"
        assert max(result["loss"], result["gradient"]) <= 1e-9 and result["state"] <= 1e-7, at
        assert not result["mismatches"] and not result["held"], at


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "microbatches"), [("gpt", 2), ("llama", 4)])
def test_strategies_on_four_ranks(name: str, microbatches: int, strategy: str) -> None:
    check(name, plans_of(name, microbatches, strategy))


@pytest.mark.ranks
@parametrize_or_slow("strategy", ["data"], ["zero kept", "zero regathered"])
def test_strategies_on_two_ranks(strategy: str) -> None:
    check("vit-1", plans_of("vit-1", 4, strategy, "a=2"))


@pytest.mark.ranks
@parametrize_or_slow("strategy", ["zero kept"], ["data", "zero regathered"])
def test_a_bucket_for_each_parameter(strategy: str) -> None:
    check("gpt-1", replace(plans_of("gpt-1", 2, strategy, "a=2"), bucket_bytes=1))


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "seed", "microbatches"), [
    ("gpt-1", 5, 2), *(pytest.param(*case, marks=pytest.mark.slow)
                       for case in (("gpt", 5, 4), ("llama", 6, 2), ("vit", 7, 2)))])
def test_random_plans(name: str, seed: int, microbatches: int) -> None:
    check(name, random_plan(captured(name, microbatches), seed, microbatches=microbatches))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "vit", "t5"])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_many_random_plans(name: str, microbatches: int) -> None:
    for seed in range(8):
        check(name, random_plan(captured(name, microbatches), seed, microbatches=microbatches))


def of_parameters(strategy: str) -> Counter[tuple[str, str, str, str]]:
    """How often each bucket of parameters is sent, by the first of them."""
    plan = plans_of("gpt", 4, strategy)
    sent = traffic(plan, add_hubs(captured("gpt", 4).graph))
    return Counter((s.direction, s.kind, s.axes, s.origin.split(",")[0]) for s in sent if " -> " not in s.origin)


def test_what_is_kept_is_sent_once_and_what_is_not_in_every_microbatch() -> None:
    """The tied weight is always kept."""
    kept, again = map(of_parameters, ("zero kept", "zero regathered"))
    assert set(kept.values()) == {1}
    assert {name for (*_, name), times in again.items() if times == 1} <= {"inner.tokens.weight"}
    assert set(again.values()) <= {1, 4}
    assert {(direction, kind) for (direction, kind, _, _), times in again.items() if times == 4} >= {
        ("forward", "all-gather"), ("backward", "all-gather"), ("backward", "reduce-scatter")}


class Turned(nn.Module):
    """A weight that is read in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.tanh() @ self.weight.t()).square().mean()


def test_what_is_gathered_again_for_a_view_is_priced_so() -> None:
    sample = parted(Sample((torch.randn(8, 8, dtype=torch.float64),)), 4)
    (plan,) = random_plans(Turned(), sample, "a=4", 1, roles={"a": "zero"}, regather=True, microbatches=4)
    sent = Counter[str]()
    for one in traffic(plan, add_hubs(capture(Turned(), sample).graph)):
        share = 3 / 4 if one.kind != "all-reduce" else 2 * 3 / 4
        sent[one.axes] += int(share * one.nbytes)
    assert plan.stored[0].regather and plan.predicted.volume == pytest.approx(dict(sent))


class Scaled(Turned):
    """Backward reads the weight, since its input takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def scaled(plan: Plan, sample: Sample) -> tuple[Tensor, list[str]]:
    """The gradient of the weight in a step, and what of its record is not planned."""
    torch.manual_seed(0)
    module = Scaled()
    parallel = parallelize(module, plan, sample)
    parallel.step(sample.args)
    assert module.weight.grad is not None
    return whole(module.weight.grad), mismatches(parallel)


@pytest.mark.ranks
def test_ranks_gather_again_together_where_a_view_becomes_a_partial_sum() -> None:
    """The first rank reads the view itself, the others zeros."""
    torch.manual_seed(0)
    module, sample = Scaled(), Sample((torch.randn(8, 8, dtype=torch.float64),))
    of = capture(module, sample)
    plan = next(plan for plan in (random_plan(of, seed, "a=2") for seed in range(400))
                if plan.index().stored["weight"].regather
                and any(c.op.startswith("matmul") and c.forward == ("a: B->P",) and c.slot == "other"
                        for c in plan.conversions))
    module(*sample.args).backward()
    for gradient, wrong in on_ranks(2, scaled, plan, sample):
        torch.testing.assert_close(gradient, module.weight.grad)
        assert not wrong


def accumulated(plan: Plan) -> tuple[float, list[float]]:
    """Two steps before zero_grad: the error of the gradients against twice one step's; what evaluation says."""
    module, sample = built("gpt-1")
    parallel = parallelize(module, plan, captured=captured("gpt-1", plan.microbatches))
    batch = sample.args
    evaluated = [float(parallel(batch)), float(parallel(parallel.local_batch(batch)))]
    parallel.step(batch)
    once = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    parallel.step(batch)
    return max(float((whole(p.grad) - 2 * once[n]).abs().max()) for n, p in module.named_parameters()
               if p.grad is not None), evaluated


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["zero kept", pytest.param("zero regathered", marks=pytest.mark.slow),
                                      pytest.param("tensor x data", marks=pytest.mark.slow)])
def test_steps_add_up_until_gradients_are_zeroed(strategy: str) -> None:
    for error, evaluated in on_ranks(4, accumulated, plans_of("gpt-1", 2, strategy)):
        assert error < 1e-12
        assert evaluated == pytest.approx([truth("gpt-1")[0][0]] * 2, abs=1e-12)


@shared
def dropping() -> Captured:
    return capture(*zoo.gpt(layers=1, B=4, dropout=0.2, dtype=torch.float64))


def dropped(plan: Plan, seed: int) -> list[float]:
    module, sample = zoo.gpt(layers=1, B=ROWS, dropout=0.2, dtype=torch.float64)
    parallel = parallelize(module, plan, seed=seed, captured=dropping())
    return [float(parallel.step(sample)) for _ in range(2)]


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["a=2"], [MESH])
def test_every_microbatch_drops_otherwise_and_always_the_same(mesh: str) -> None:
    """Two microbatches with the same rows would have the same loss if they had the same masks."""
    module, sample = zoo.gpt(layers=1, B=4, dropout=0.2, dtype=torch.float64)
    one, split = (random_plans(module, sample, one, 1, microbatches=2, captured=dropping())[0]
                  for one in ("one=1", mesh))
    expected = dropped(one, 3)
    assert dropped(one, 3) == expected != dropped(one, 4) and expected[0] != expected[1]
    assert all(losses == pytest.approx(expected, abs=1e-12) for losses in on_ranks(split.mesh.size, dropped, split, 3))
    parallel = parallelize(zoo.gpt(layers=1, B=4, dropout=0.2, dtype=torch.float64)[0], one, captured=dropping())
    assert isinstance(parallel, MeshModel)
    parts = parallel.local_batch(tuple(torch.cat([t, t]) for t in sample.args)).parts
    first, second = (parallel._microbatch(part, pieces) for part, pieces in enumerate(parts))
    assert first != second


def test_buffers_change_with_every_microbatch() -> None:
    module, sample = zoo.vgg_bn(B=4, dtype=torch.float64)
    own, _ = zoo.vgg_bn(B=4, dtype=torch.float64)
    (plan,) = random_plans(module, parted(sample, 2), "one=1", 1, microbatches=2)
    parallelize(module, plan).step(sample)
    for part in range(2):
        own(*parted(sample, 2, part).args)
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit() -> None:
    module, sample = built("gpt-1")
    (plan,) = random_plans(module, parted(sample, 2), "one=1", 1, microbatches=2)
    parallel = parallelize(module, plan, sample)
    with pytest.raises(MismatchError, match=r"int64\[7, 16\], the plan .* int64\[8, 16\], 2 microbatches of 4 each"):
        parallel.step(tuple(t[:7] for t in sample.args))
    with pytest.raises(MismatchError, match="of 1 microbatches, the plan runs 2"):
        whole_one = random_plans(module, sample, "one=1", 1)[0]
        parallel.step(parallelize(built("gpt-1")[0], whole_one).local_batch(sample))
    with pytest.raises(InputError, match=r"3 microbatches cut dim 0 .* multiple of 3"):
        parted(sample, 3)
