"""A plan runs as one device would: loss, gradients, buffers, dropout; and it sends what was predicted."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from planmaker import random_plans
from ranks import forget, on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.layout import Layout, Split
from autoddl.core.plan import Plan
from autoddl.runtime.batches import digest
from autoddl.runtime.parallelize import MeshModel, ParallelModel, parallelize
from autoddl.schedule.traffic import traffic


class Uneven(nn.Module):
    """Odd sizes everywhere, a shared weight, a frozen one, an idle one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(11, 13), nn.Linear(13, 13, bias=False), nn.Linear(13, 7)
        self.again, self.idle = nn.Linear(13, 13), nn.Linear(3, 5)
        self.again.weight = self.middle.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = x + torch.tanh(self.again(self.middle(x)))
        loss: Tensor = (self.last(F.layer_norm(x, (13,))) - y).square().mean()
        return loss


class Written(nn.Module):
    """Values written into slices, one group of channels, and a buffer that takes what another one was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv1d(4, 6, 3), nn.GroupNorm(1, 6), nn.Linear(6, 4)
        self.now, self.before = nn.Buffer(torch.ones(4)), nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean(2)
        z = y.new_zeros(8, 6)
        z[:, :4] = self.last(y)
        z[:, 4] += y[:, 0]
        z[2:4] = y[0]
        self.before.copy_(self.now)
        self.now.copy_(z.detach()[:, :4].mean(0))
        loss: Tensor = (z + z.roll(1, 1)).square().mean()
        return loss


class Saturated(nn.Module):
    """Alpha dropout of elements, then of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.alpha_dropout(self.first(x), 0.25, training=True)
        h = F.feature_alpha_dropout(h.reshape(-1, 4, 4), 0.5, training=True)
        loss: Tensor = self.last(h.flatten(1)).square().mean()
        return loss


class Bare(nn.Module):
    """A parameter that no reset_parameters() sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


DROPPED = ("dropout", "saturated")
"""Models that draw what they drop."""


def build(name: str) -> tuple[nn.Module, Any]:
    if name == "uneven":
        return Uneven().double(), (torch.linspace(-1, 1, 77).double().view(7, 11), torch.ones(7, 7).double())
    if name == "written":
        return Written().double(), (torch.linspace(-1, 2, 256).double().view(8, 4, 8).sin(),)
    if name == "saturated":
        return Saturated().double(), (torch.linspace(-1, 1, 64).double().view(8, 8),)
    if name == "single":
        return zoo.gpt(layers=1)
    if name == "dropout":
        return zoo.gpt(layers=1, dtype=torch.float64, dropout=0.1)
    return zoo.named(name, dtype=torch.float64)


@shared
def captured(name: str) -> Captured:
    return capture(*build(name))


def drawn(name: str, mesh: str, count: int, seed: int) -> list[Plan]:
    return random_plans(*build(name), mesh, count, seed=seed, captured=captured(name))


def whole(value: Any) -> Tensor:
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert isinstance(found, Tensor)
    return found.detach()


def call(model: nn.Module, sample: Any) -> Tensor:
    loss: Tensor = model(*sample) if isinstance(sample, tuple) else model(*sample.args, **sample.kwargs)
    return loss


def gradients(parameters: Any) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in parameters if p.grad is not None}


def on_one_device(name: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The eager model; with dropout, whose mask is ours, the captured program on one rank."""
    model, sample = build(name)
    if name in DROPPED:
        parallel = parallelize(model, drawn(name, "one=1", 1, seed=0)[0], captured=captured(name))
        return parallel.step(sample), gradients(parallel.named_parameters()), {}
    loss = call(model, sample)
    loss.backward()
    return loss.detach(), gradients(model.named_parameters()), dict(model.named_buffers())


def run(name: str, plans: list[Plan], expected: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]) -> None:
    loss, grads, buffers = expected
    for number, plan in enumerate(plans):
        model, sample = build(name)
        parallel = parallelize(model, plan, captured=captured(name))
        torch.testing.assert_close(parallel.step(sample), loss, rtol=1e-12, atol=1e-12)
        found = gradients(parallel.named_parameters())
        assert found.keys() == grads.keys()
        for key, gradient in grads.items():
            error = (found[key] - gradient).abs().max().item()
            assert error <= 1e-10 * max(1.0, gradient.abs().max().item()), f"plan {number}: {key} is wrong by {error}"
        for key, buffer in buffers.items():
            torch.testing.assert_close(model.get_buffer(key), buffer, rtol=1e-12, atol=1e-12)
        check_traffic(parallel)
        parallel.step(parallel.local_batch(sample))
        assert all(torch.allclose(g, 2 * grads[k], rtol=1e-6) for k, g in gradients(parallel.named_parameters()).items()
                   ) or name in (*DROPPED, "vgg_bn", "resnet", "written")
        check_traffic(parallel)


def check_traffic(parallel: ParallelModel) -> None:
    predicted = traffic(parallel.plan, parallel.graph, parallel.groups.coordinate)
    sent = Counter((s.direction, s.kind, s.axes, s.nbytes) for s in predicted)
    executed = Counter((e.direction, e.kind, e.axes, e.nbytes) for e in parallel.recorder.executed)
    assert executed == sent, f"predicted but not sent: {sent - executed}, sent but not predicted: {executed - sent}"


@pytest.mark.ranks
@parametrize_or_slow("name,mesh,count", [
    ("uneven", "a=2,b=2", 2), ("written", "a=2", 2), ("gpt-1", "a=2,b=2", 1),
    ("saturated", "a=2", 1), ("resnet", "a=2", 1)], [
    ("saturated", "a=2,b=2", 1), ("vgg_bn", "a=2,b=2", 1),
    ("uneven", "a=4", 4), ("uneven", "a=2,b=2", 6), ("written", "a=2", 8), ("gpt", "a=2,b=2", 3), ("gpt", "a=3", 2),
    ("dropout", "a=2,b=2", 2), ("saturated", "a=2,b=2", 3), ("vgg_bn", "a=2,b=2", 2), ("resnet", "a=4", 2)])
def test_random_plans_compute_what_one_device_does(name: str, mesh: str, count: int) -> None:
    plans = drawn(name, mesh, count, seed=1)
    on_ranks(plans[0].mesh.size, run, name, plans, on_one_device(name))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "vgg_bn", "resnet", "uneven", "dropout"])
@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=2", "a=3"])
def test_many_random_plans(name: str, mesh: str) -> None:
    plans = drawn(name, mesh, 20, seed=2)
    on_ranks(plans[0].mesh.size, run, name, plans, on_one_device(name), seconds=1200)


@pytest.mark.ranks
@pytest.mark.parametrize("roles", [{"a": "data"}, {"a": "zero"}, {"a": "tensor"}])
def test_named_strategies(roles: dict[str, str]) -> None:
    plans = [random_plans(*build("gpt-1"), "a=2", 1, roles=roles, regather=again, captured=captured("gpt-1"))[0]
             for again in (False, True)]
    on_ranks(2, run, "gpt-1", plans, on_one_device("gpt-1"))


def train(plan: Plan) -> tuple[list[float], float]:
    model, sample = build("single")
    parallel = parallelize(model, plan, captured=captured("single"))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(parallel.step(sample).item())
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
    return losses, parallel(sample).item()


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["a=2"], ["a=2,b=2"])
def test_training_with_an_optimizer(mesh: str) -> None:
    expected, last = train(drawn("single", "one=1", 1, seed=0)[0])
    assert expected[-1] < expected[0]
    for plan in drawn("single", mesh, 1, seed=3):
        for losses, evaluated in on_ranks(plan.mesh.size, train, plan):
            assert losses == pytest.approx(expected, abs=1e-5) and evaluated == pytest.approx(last, abs=1e-5)


def evaluate(plan: Plan) -> tuple[float, bool]:
    model, sample = build("dropout")
    parallel = parallelize(model, plan, captured=captured("dropout"))
    loss = parallel(sample).item()
    tied = model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    return loss, tied and all(p.grad is None for p in parallel.parameters())


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["a=2"], ["a=2,b=2"])
def test_evaluation_drops_nothing_and_ties_are_kept(mesh: str) -> None:
    _, sample = build("dropout")
    (plan,) = drawn("dropout", mesh, 1, seed=0)
    expected = call(zoo.gpt(layers=1, dtype=torch.float64)[0], sample).item()
    for loss, kept in on_ranks(plan.mesh.size, evaluate, plan):
        assert loss == pytest.approx(expected, abs=1e-12) and kept


def inferred(plan: Plan) -> tuple[float, float, float]:
    """Under inference mode, then without, and a step after both."""
    model, sample = build("gpt-1")
    parallel = parallelize(model, plan, captured=captured("gpt-1"))
    with torch.inference_mode():
        first = parallel(sample).item()
    return first, parallel(sample).item(), parallel.step(sample).item()


@pytest.mark.ranks
def test_inference_mode_changes_nothing() -> None:
    model, sample = build("gpt-1")
    (plan,) = random_plans(model, sample, "a=2", 1, roles={"a": "zero"}, captured=captured("gpt-1"))
    device = "{name: core, kind: cpu, memory: 1 GB, bandwidth: 5 GB/s, peak: {float64: 1 GFLOP/s}}"
    link = "{name: a, size: 2, bandwidth: 10 kB/s, latency: 10 us}"  # so slow that messages of our own pay
    slow = f"{{name: slow, device: {device}, levels: [{link}]}}"
    for losses in on_ranks(2, inferred, replace(plan, source={"cluster": slow})):
        assert losses == pytest.approx((losses[0],) * 3, rel=1e-12)


class Routed(nn.Module):
    """An argmax reads what carries a gradient elsewhere; a buffer that no seed makes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.Parameter(torch.arange(32.0).view(4, 8) / 32)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        chosen = self.experts[logits.argmax(-1)] * logits.softmax(-1).amax(-1, keepdim=True)
        loss: Tensor = (x * chosen * self.get_buffer("scale")).square().mean()
        return loss


def routed(plans: list[Plan]) -> list[float]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        parallel = parallelize(Routed().double(), plan)
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)
        found.append(parallel.step((x,)).item())
        check_traffic(parallel)
        found += [whole(p.grad).sum().item() for p in parallel.parameters()]
    return found


@pytest.mark.ranks
@parametrize_or_slow("count", [4], [12])
def test_no_gradient_is_planned_for_what_has_none(count: int) -> None:
    torch.manual_seed(0)
    sample = (torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8),)
    plans = random_plans(Routed().double(), sample, "a=2", count)
    model = Routed().double()
    torch.manual_seed(0)
    model.load_state_dict(Routed().double().state_dict())
    loss = model(*sample)
    loss.backward()
    expected = [loss.item(), *(p.grad.sum().item() for p in model.parameters() if p.grad is not None)] * count
    for found in on_ranks(2, routed, plans):
        assert found == pytest.approx(expected, abs=1e-12)


def differing(plan: Plan) -> str:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Routed().double()
    model.get_buffer("scale").fill_(dist.get_rank())
    with pytest.raises(MismatchError) as error:
        parallelize(model, plan)
    return str(error.value)


@pytest.mark.ranks
def test_buffers_that_differ_are_refused() -> None:
    sample = (torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8),)
    (plan,) = random_plans(Routed().double(), sample, "a=2", 1)
    assert all("rank 1 has another value of the buffers" in text for text in on_ranks(2, differing, plan))


def moved(plan: Plan) -> str:
    """Weights that are whole numbers, in another order on rank 1."""
    import torch.distributed as dist

    model, _ = build("uneven")
    weight = model.get_parameter("last.weight")
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view_as(weight))
        weight.copy_(weight.flip(0) if dist.get_rank() else weight.clone())
    with pytest.raises(MismatchError) as error:
        parallelize(model, plan)
    return str(error.value)


@pytest.mark.ranks
def test_weights_in_another_order_are_refused() -> None:
    (plan,) = random_plans(*build("uneven"), "a=2", 1)
    assert all("rank 1 has another value of the weights" in text for text in on_ranks(2, moved, plan))


def test_equal_weights_are_equal_however_many_threads_there_are() -> None:
    values = torch.randn(1_000_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, threads = set(), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4, 7):
            torch.set_num_threads(count)
            found.add(digest(values))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int32,
                                   torch.float8_e4m3fn])
def test_the_bytes_of_any_tensor_are_digested(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([0, 1, 1, 0, 1, 0])
    values, turned = numbers.to(dtype), numbers.flip(0).to(dtype)
    whole = digest(values)
    monkeypatch.setattr("autoddl.runtime.batches.PART", 4)
    assert digest(values.clone()) == digest(values.repeat_interleave(2)[::2]) == whole != digest(turned)
    assert digest(values.view(2, 3).t()) == digest(values.view(2, 3).t().contiguous()) != whole
    assert digest(values[0]) == digest(values[:1]) != digest(values[1])
    assert digest(values[:0]) == digest(torch.empty(0, 3, dtype=dtype)) != whole


def test_a_conjugate_is_digested_as_what_it_is() -> None:
    values = torch.tensor([1 + 2j, 2 + 3j])
    assert digest(values.conj()) == digest(torch.tensor([1 - 2j, 2 - 3j])) != digest(values)
    assert digest(values.conj().imag) == digest(torch.tensor([-2.0, -3.0]))


def gathered(plan: Plan) -> int:
    """Whole weights of the middle of the model that live between forward and backward."""
    model, sample = build("gpt-1")
    parallel = parallelize(model, plan, captured=captured("gpt-1"))
    assert isinstance(parallel, MeshModel)
    parallel.runner.forward(0, parallel.local_batch(sample).parts[0], {}, 0, last=True)
    shapes = Counter(tuple(o.shape) for o in gc.get_objects() if isinstance(o, Tensor) and o.dtype == torch.float64)
    return shapes[128, 32]


@pytest.mark.ranks
def test_regathered_parameters_are_not_kept() -> None:
    kept, again = (random_plans(*build("gpt-1"), "a=2", 1, roles={"a": "zero"}, regather=r,
                                captured=captured("gpt-1"))[0] for r in (False, True))
    assert on_ranks(2, gathered, again) < on_ranks(2, gathered, kept)


def refused(plans: list[Plan], seeds: list[int]) -> str:
    import torch.distributed as dist

    model, _ = build("uneven")
    with torch.no_grad():
        model.last.weight.add_(seeds[dist.get_rank()])  # type: ignore[union-attr,operator]
    with pytest.raises(MismatchError) as error:
        parallelize(model, plans[dist.get_rank()])
    return str(error.value)


@pytest.mark.ranks
def test_ranks_that_differ_are_refused_everywhere() -> None:
    one, two = random_plans(*build("uneven"), "a=2", 2)
    assert all("rank 1 has another plan" in text for text in on_ranks(2, refused, [one, two], [0, 0]))
    assert all("rank 1 has another value of the weights" in text for text in on_ranks(2, refused, [one, one], [0, 1]))
    three = random_plans(*build("uneven"), "a=3", 1) * 2
    assert all("mesh 'a=3'" in text for text in on_ranks(2, refused, three, [0, 0]))


def test_what_does_not_fit() -> None:
    model, sample = build("uneven")
    (plan,) = random_plans(model, sample, "one=1", 1)
    with pytest.raises(MismatchError, match="another model"):
        parallelize(nn.Sequential(Uneven(), nn.Identity()).get_submodule("0"), plan)
    parallel = parallelize(model, plan)
    with pytest.raises(MismatchError, match=r"x is float64\[6, 11\], the plan was made for float64\[7, 11\]"):
        parallel.step((sample[0][:6], sample[1]))
    with pytest.raises(MismatchError, match="does not fit forward"):
        parallel.step((sample[0],))
    with pytest.raises(MismatchError, match="the plan is for 2 processes"):
        parallelize(build("uneven")[0], random_plans(model, sample, "a=2", 1)[0])


class Turning(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.angles = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * self.angles.cos()).square().mean()
        return loss


class Looked(nn.Module):
    """Rows of a table whose gradient is sparse outside a plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.table(tokens).square().sum(-1).mean()
        return loss


def looked(plans: list[Plan]) -> list[Tensor]:
    found = []
    for plan in plans:
        parallel = parallelize(Looked().double(), plan)
        parallel.step((torch.tensor([0, 5, 2, 5]),))
        found += [whole(p.grad) for p in parallel.parameters()]
    return found


@pytest.mark.ranks
def test_the_gradient_of_a_table_is_dense() -> None:
    model, sample = Looked().double(), (torch.tensor([0, 5, 2, 5]),)
    plans = [random_plans(model, sample, "a=2", 1, roles={"a": role})[0] for role in ("data", "zero")]
    call(model, sample).backward()
    expected = model.table.weight.grad
    assert expected is not None and expected.is_sparse
    for grads in on_ranks(2, looked, plans):
        for found in grads:
            torch.testing.assert_close(found, expected.to_dense(), rtol=1e-12, atol=1e-12)


def test_what_is_on_the_meta_device_and_no_buffer_is_refused() -> None:
    """A plan can be made of it."""
    with torch.device("meta"):
        model = Turning()
    sample = (torch.ones(2, 4),)
    (plan,) = random_plans(model, sample, "one=1", 1)
    with pytest.raises(InputError, match=r"a tensor on the meta device that is no buffer, angles, .*: register_buffer"):
        parallelize(model, plan)
    assert parallelize(Turning(), plan).step(sample).isfinite()


def outside(plan: Plan, index: int) -> str:
    parallel = parallelize(Looked().double(), plan)
    with pytest.raises(IndexError) as error:
        parallel.step((torch.tensor([0, 5, index, 5]),))
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_of_no_row_is_an_error_where_the_rows_are_split(index: int) -> None:
    model, sample = Looked().double(), (torch.tensor([0, 5, 2, 5]),)
    with pytest.raises(IndexError):
        model(torch.tensor([0, 5, index, 5]))
    plan = next(plan for plan in random_plans(model, sample, "a=2", 20) if any(
        d.target == "aten.embedding.default" and d.inputs[0] == Layout((Split(0),)) for d in plan.decisions))
    for said in on_ranks(2, outside, plan, index):
        assert f"index {index} is of no row of table, which has 6: give indices from 0 to 5" in said


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), labels)


def below(plan: Plan, x: Tensor) -> str:
    parallel = parallelize(Labelled().double(), plan)
    with pytest.raises(IndexError) as error:
        parallel.step((x, torch.tensor([0, -1, 2, -100])))
    return str(error.value)


@pytest.mark.ranks
def test_a_label_below_0_is_an_error_where_the_classes_are_split() -> None:
    x, labels = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 3, 2, -100])
    plan = next(plan for plan in random_plans(Labelled().double(), (x, labels), "a=2", 40) if any(
        "token_loss" in d.target and d.inputs[0] == Layout((Split(1),)) for d in plan.decisions))
    for said in on_ranks(2, below, plan, x):
        assert "label -1 is below 0 and not ignore_index" in said


class Masked(nn.Module):
    """A mask that may be there, one that nothing reads, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, beta: float = 1.0, mask: Tensor | None = None, idle: Tensor | None = None,
                cache: bool | None = None, sizes: tuple[int, int] = (2, 2)) -> Tensor:
        loss: Tensor = (beta * self.linear(x)).square().mean() if mask is None else (self.linear(x) * mask).mean()
        return loss


@pytest.mark.parametrize(("given", "pattern"), [
    ({"mask": torch.ones(3)}, r"the batch has a tensor mask, which the plan does not read"),
    ({"beta": 0.5}, r"beta is 0\.5, the plan was made for 0\.0: what is no tensor is fixed"),
    ({"beta": torch.tensor(0.0)}, "the batch has a tensor beta"),
    ({"sizes": (2, 3)}, r"sizes\.1 is 3, the plan was made for 2"),
    ({"cache": True}, "cache is True, the plan was made for None"),
    ({"cache": object()}, "cache is <class 'object'>, the plan was made for None"),
])
def test_what_a_plan_does_not_read_is_not_dropped(given: dict[str, Any], pattern: str) -> None:
    sample: dict[str, Any] = {"x": torch.ones(2, 3), "beta": 0.0, "idle": torch.ones(2)}
    model = Masked()
    parallel = parallelize(model, random_plans(model, sample, "one=1", 1)[0])
    for good in (sample, {**sample, "beta": 0, "cache": None, "mask": None, "sizes": (2, 2)},
                 (sample["x"], 0.0, None, sample["idle"])):
        assert parallel.step(good) == 0
    for run in (parallel.step, parallel, parallel.local_batch):
        with pytest.raises(MismatchError, match=pattern):
            run({**sample, **given})


def test_a_value_that_the_sample_leaves_out_is_that_of_forward() -> None:
    model, x = Masked(), torch.ones(2, 3)
    parallel = parallelize(model, random_plans(model, (x,), "one=1", 1)[0])
    assert parallel((x, 1.0)) == parallel({"x": x}) == model(x)
    with pytest.raises(MismatchError, match=r"beta is 2\.0, the plan was made for 1\.0"):
        parallel.step((x, 2.0))


def seeded(plan: Plan) -> str:
    """Every rank drops other elements."""
    import torch.distributed as dist

    with pytest.raises(MismatchError) as error:
        parallelize(build("uneven")[0], plan, seed=dist.get_rank())
    return str(error.value)


@pytest.mark.ranks
def test_seeds_that_differ_are_refused() -> None:
    (plan,) = random_plans(*build("uneven"), "a=2", 1)
    assert all("rank 1 has another seed than rank 0" in text for text in on_ranks(2, seeded, plan))


deserters: list[ParallelModel] = []


def deserted(plan: Plan) -> str:
    import torch.distributed as dist

    model, sample = build("uneven")
    parallel = parallelize(model, plan, timeout=2)
    parallel.step(sample)
    if dist.get_rank() == 3:
        deserters.append(parallel)  # alive, with its connections open
        return ""
    with pytest.raises(MachineError) as error:
        parallel.step(sample)
    return str(error.value)


@pytest.mark.ranks
def test_a_rank_that_hangs_is_a_machine_error() -> None:
    (plan,) = random_plans(*build("uneven"), "a=2,b=2", 1, seed=1)
    try:
        assert any("failed" in text and "over" in text for text in on_ranks(4, deserted, plan))
    finally:
        forget(4)


def test_a_meta_model_gets_its_own_initial_values() -> None:
    _, sample = build("uneven")
    with torch.device("meta"):
        model = Uneven().double()
    (plan,) = random_plans(model, sample, "one=1", 1)
    first = parallelize(model, plan).step(sample)
    assert torch.isfinite(first)
    with torch.device("meta"):
        bare = Bare()
    (plan,) = random_plans(bare, (torch.ones(3),), "one=1", 1)
    with pytest.raises(InputError, match="no reset_parameters"):
        parallelize(bare, plan)
