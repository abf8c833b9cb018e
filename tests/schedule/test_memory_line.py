"""The memory line against torch's own tracker, and against what the search charges."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import decoders
import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from ranks import on_ranks
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from tracked_bytes import tracked_peak

from autoddl.api import plan
from autoddl.capture.capture import capture
from autoddl.capture.sample import as_sample, parted
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import policy_blocks
from autoddl.explain.compare_run import foreseen, foreseen_bytes
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value, contiguous, viewed
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.trials.cases import Case, case, fill
from autoddl.operators.work import keeps_input
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.memory_line import predict_memory

ONE = replace(cluster_of("core=1"), device=replace(cluster_of("core=1").device, kind="cpu"))
NEAR = 0.05
"""Relative, of the peak."""


def tracked(model: torch.nn.Module, sample: object, made: Plan) -> int:
    return tracked_peak(parallelize(model, made, sample), model, sample)


@parametrize_or_slow("name,options,microbatches", [("gpt", {"dropout": 0.1}, 2), ("vgg_bn", {}, 1)], [
    ("gpt", {}, 1), ("llama", {}, 1), ("mixture", {"layers": 1}, 1), ("routed", {"layers": 1}, 1),
    ("routed", {"family": "DeepseekV3"}, 2)])
def test_the_predicted_peak_is_the_tracked_one(name: str, options: dict[str, float], microbatches: int) -> None:
    torch.manual_seed(0)
    model, sample = getattr(zoo, name)(**options)
    made = plan(model, ONE, sample, microbatches=(microbatches,))
    assert made.predicted.peak_bytes == pytest.approx(tracked(model, sample, made), rel=NEAR)


@parametrize_or_slow("name,policy,microbatches", [("gpt", "full", 2), ("gpt", "first-1:selective", 1)], [
    ("mixture", "first-1", 1), ("llama", "selective", 1), ("gpt", "full", 1), ("gpt", "every-2", 2),
    ("gpt", "selective", 2), *((name, policy, m)
    for name in ("llama", "vit", "t5", "mixture", "routed", "resnet")
    for policy, m in (("full", 1), ("every-2", 2), ("selective", 2), ("first-1:selective", 1), ("light", 2)))])
def test_the_predicted_peak_is_the_tracked_one_where_blocks_are_computed_again(name: str, policy: str,
                                                                                microbatches: int) -> None:
    torch.manual_seed(0)
    model, sample = getattr(zoo, name)()
    made = plan(model, ONE, sample, microbatches=(microbatches,), recompute=(policy,))
    assert made.recompute
    assert made.predicted.peak_bytes == pytest.approx(tracked(model, sample, made), rel=NEAR)


class Wide(torch.nn.Module):
    """Its peak is where the gradient of the large weight is cast to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(256, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.line(x).float().square().mean()
        return loss


def test_a_gradient_that_is_cast_is_not_copied_once_more() -> None:
    model, sample = Wide(), (torch.randn(2, 256),)
    made = plan(model, ONE, sample, precision="bf16-mixed", optimizer="sgd")
    parallel = parallelize(model, made, sample)
    for _ in range(2):
        parallel.module.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            parallel.step(sample)
    found = max(int(one["Total"]) for one in tracker.get_tracker_snapshot("peak").values())
    assert made.predicted.peak_bytes == pytest.approx(found, rel=0.005)


@parametrize_or_slow("name,microbatches", [("gpt", 2)], [("resnet", 1)])
def test_the_predicted_peak_of_a_mixed_plan_is_the_tracked_one(name: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model, sample = getattr(zoo, name)()
    made = plan(model, ONE, sample, microbatches=(microbatches,), precision="bf16-mixed")
    assert made.predicted.peak_bytes == pytest.approx(tracked(model, sample, made), rel=NEAR)


def test_the_line_stays_below_the_budget_and_ends_where_it_began() -> None:
    """But for the gradients, which the optimizer leaves to be zeroed."""
    model, sample = zoo.vit()
    made = plan(model, ONE, sample)
    line = foreseen_bytes(made, foreseen(made))
    assert line.peak == pytest.approx(made.predicted.peak_bytes)
    assert line.peak <= line.budget == made.budget
    assert list(line.times) == sorted(line.times) and line.times[-1] <= foreseen(made).step.seconds * (1 + 1e-9)
    parts = made.predicted.nbytes
    assert sum(parts.values()) == pytest.approx(line.peak)
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"])


class Sliced(nn.Module):
    """An op that takes time in backward alone: a slice is a view forward, and is padded backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.first(x)[:, :32])).square().mean()
        return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_moments_of_forward_come_before_its_backward_and_bytes_are_told_by_kind(microbatches: int) -> None:
    made = plan(Sliced(), ONE, (torch.randn(32, 64),), microbatches=(microbatches,))
    step = foreseen(made)
    line, starts = foreseen_bytes(made, step), [start for name, start in step.step.passes if name == "backward"]
    assert line.times[line.nbytes.index(line.peak)] <= step.step.seconds
    within = sum(at <= starts[0] for at in line.times)
    assert len(starts) == microbatches and within >= 0.3 * len(line.times) / microbatches
    for held, kinds in zip(line.nbytes, line.kinds, strict=True):
        assert sum(kinds.values()) == pytest.approx(held)
    largest = line.kinds[line.nbytes.index(line.peak)]
    assert {kind: held for kind, held in largest.items() if held} == pytest.approx(made.predicted.nbytes)


class Taught(nn.Module):
    """The teacher's weights are trained for all that capture knows, and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        guess = self.student(x)
        return nn.functional.mse_loss(guess, self.teacher(x).detach())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_gathered_again_for_no_gradient_is_held_no_longer_than_its_microbatch(microbatches: int) -> None:
    sample = (torch.zeros(8, 16),)
    graph, place = add_hubs(capture(Taught(), sample).graph), cluster_of("node=4")
    for made in random_plans(Taught(), sample, "node=4", 20, regather=True, microbatches=microbatches):
        heap, once = (predict_memory(made, graph, "adamw", place, most) for most in (microbatches, 1))
        assert heap.held == once.held and heap.peak >= heap.held


@parametrize_or_slow("policy", ["none"], ["full", "first-1:selective"])
@pytest.mark.parametrize("microbatches,in_flight", [(4, 4), (5, 4), (9, 6)])
def test_microbatches_in_flight_that_are_alike_are_counted_as_if_each_were_acted_out(
        microbatches: int, in_flight: int, policy: str) -> None:
    model, sample = zoo.gpt(layers=2)
    graph, place = add_hubs(capture(model, sample).graph), cluster_of("a=2,b=2")
    for made in random_plans(model, sample, "a=2,b=2", 4, regather=False, microbatches=microbatches):
        made = replace(made, in_flight=in_flight, waiting=2, recompute=policy_blocks(graph, policy))
        few, each = (predict_memory(made, graph, "adamw", place, watched=watched) for watched in (False, True))
        assert few.peak == each.peak and few.held == each.held and few.most == each.most
        assert len(few.line) < len(each.line)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.RMSNorm(256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss


class Student(torch.nn.Module):
    """Taught by what no gradient reaches, without no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(64, 64)
        self.teacher = torch.nn.Sequential(*(part for _ in range(6)
                                             for part in (torch.nn.Linear(64, 64), torch.nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.own(x) - self.teacher(x).detach()).square().mean()
        return loss


class Heard(torch.nn.Module):
    """A loss of `body`'s output."""

    def __init__(self, body: torch.nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x), y)


class Biased(torch.nn.Module):
    """Attention with numbers added to the scores, no dim for the batch."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
        self.register_buffer("bias", torch.randn(4, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(8, 64, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        loss: Tensor = self.out(mixed.transpose(1, 2).reshape(8, 64, 64)).square().mean()
        return loss


class Cast(torch.nn.Module):
    """What is turned, cast and turned back is laid out in memory as it was, and so is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).double()

    def forward(self, x: Tensor) -> Tensor:
        turned = self.before(x).view(8, 256, 4, 16).transpose(1, 2)
        back = turned.double().exp().transpose(1, 2).reshape(8, 256, 64)
        loss: Tensor = self.after(back).square().mean().float()
        return loss


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 128))


def upward() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.ReLU(), torch.nn.Upsample(scale_factor=2),
                               torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


def sequence() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)


class Masked(torch.autograd.Function):
    """Keeps its inputs, and a mask beside what autograd knows of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mask = x > 0
        return nn.functional.gelu(x) * weight

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return upstream * weight * ctx.mask, (upstream * x).sum(0)


class OwnLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)
        self.weight = torch.nn.Parameter(torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Masked.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
        loss: Tensor = self.last(h).square().mean()
        return loss


class Recurring(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(64, 64, batch_first=True)  # type: ignore[call-arg,arg-type]

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x)[0].square().mean()
        return loss


TWO = (torch.randn(512, 128), torch.randn(512, 128))


@pytest.mark.parametrize(("model", "sample", "microbatches"), [
    (Normed(), (torch.randn(512, 256),), 1), (Student(), (torch.randn(2048, 64),), 1),
    (Biased(), (torch.randn(8, 64, 64),), 1), (Cast(), (torch.randn(8, 256, 64),), 1),
    (Heard(plain(), nn.functional.mse_loss), TWO, 1),
    (Heard(plain(), nn.functional.mse_loss), TWO, 4), (Heard(plain(), nn.functional.l1_loss), TWO, 1),
    (Heard(upward(), nn.functional.cross_entropy), (torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)), 1),
    (Heard(sequence(), nn.functional.mse_loss), (torch.randn(8, 64, 64), torch.randn(8, 64, 64)), 1),
    (OwnLayer(), (torch.randn(512, 128),), 1),
    pytest.param(decoders.decoder(32)[0], (torch.randn(8, 3, 32, 32),), 1, marks=pytest.mark.slow),
    pytest.param(Recurring(nn.LSTM), (torch.randn(16, 32, 64),), 1, marks=pytest.mark.slow),
    pytest.param(Recurring(nn.GRU), (torch.randn(16, 32, 64),), 1, marks=pytest.mark.slow)],
    ids=["normed", "student", "biased", "cast", "mse", "parts", "l1", "upward", "sequence",
         "own", "decoder", "lstm", "gru"])
def test_what_is_kept_for_no_one_is_not_and_what_is_written_out_is(
        model: torch.nn.Module, sample: tuple[Tensor, ...], microbatches: int) -> None:
    """An RMSNorm on processors keeps its input twice; what a detached teacher computes is kept for nobody, and the
    optimizer knows nothing of its weights; a mean of squares lies where all of them were; attention is laid out as its
    queries are, and a cast as what it casts."""
    made = plan(model, ONE, sample, microbatches=(microbatches,))
    assert made.predicted.peak_bytes == pytest.approx(tracked(model, sample, made), rel=NEAR)


def part_of(model: torch.nn.Module, sample: tuple[Tensor, ...], made: Plan) -> int:
    """On a rank."""
    return tracked(model, sample, made)


class Nearest(torch.nn.Module):
    """How far the rows are from the nearest of a table, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.table = torch.nn.Linear(32, 32), torch.nn.Embedding(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.code(x)
        far = y.square().sum(1, keepdim=True) + self.table.weight.square().sum(1) - 2 * y @ self.table.weight.t()
        loss: Tensor = (self.table(far.argmin(1)) - y).square().mean()
        return loss


def deep() -> torch.nn.Module:
    return Heard(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)),
                 nn.functional.mse_loss)


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "sample", "role", "microbatches"), [
    (deep(), (torch.randn(16, 512), torch.randn(16, 512)), "data", 2),
    (deep(), (torch.randn(16, 512), torch.randn(16, 512)), "tensor", 2),
    (Nearest(), (torch.randn(2048, 32),), "tensor", 1)], ids=["data", "tensor", "nearest"])
def test_the_line_of_a_rank_is_the_tracked_one(model: torch.nn.Module, sample: tuple[Tensor, ...], role: str,
                                               microbatches: int) -> None:
    """The last gradient of a bucket is there until its reduction has started; what a parameter is after local steps is
    held from the first microbatch to the last; what was converted goes before its reader runs."""
    place = replace(cluster_of("core=2"), backend="gloo", device=ONE.device)
    captured = capture(model, parted(as_sample(sample), microbatches))
    graph = add_hubs(captured.graph)
    (made,) = random_plans(model, parted(as_sample(sample), microbatches), "core=2", 1, roles={"core": role},
                           microbatches=microbatches, regather=False if role == "tensor" else None)
    made = replace(made, backend="gloo")
    peak = predict_memory(made, graph, "adamw", place).peak
    assert peak == pytest.approx(on_ranks(2, part_of, model, sample, made)[0], rel=NEAR)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("role", ["zero", "tensor"])
@pytest.mark.parametrize("name", ["gpt", "llama", "mixture"])
def test_the_predicted_peak_on_two_ranks_is_the_tracked_one_where_ops_run_again(name: str, role: str) -> None:
    """Of a batch that is large enough for activations to be the most of it, since these run again."""
    torch.manual_seed(0)
    place = cluster_of("core=2")
    place = replace(place, device=replace(place.device, kind="cpu"))
    model, sample = getattr(zoo, name)(B=16)
    graph = add_hubs(capture(model, sample).graph)
    (made,) = random_plans(model, sample, "core=2", 1, roles={"core": role}, regather=role == "zero" or None)
    for policy in ("full", "selective", "first-1:selective", "light"):
        again = replace(made, backend="gloo", recompute=policy_blocks(graph, policy))
        peak = predict_memory(again, graph, "adamw", place).peak
        assert peak == pytest.approx(on_ranks(2, part_of, model, sample, again)[0], rel=NEAR), policy


def test_views_share_memory_where_torch_says_so() -> None:
    for shape, order, new in [
            ((4, 6, 8), (0, 1, 2), (24, 8)), ((4, 6, 8), (1, 0, 2), (24, 8)), ((4, 1, 8), (1, 0, 2), (32,)),
            ((2, 3, 4, 5), (0, 2, 1, 3), (2, 4, 15)), ((2, 3, 4, 5), (0, 1, 3, 2), (6, 5, 4))]:
        x = torch.empty(shape).permute(order)
        try:
            expected = x.view(new).stride()
        except RuntimeError:
            assert viewed(tuple(x.shape), x.stride(), new) is None
        else:
            assert viewed(tuple(x.shape), x.stride(), new) == expected
    assert contiguous((2, 3, 4)) == torch.empty(2, 3, 4).stride()


def wide() -> Tensor:
    return torch.randn(256, 512)


ROWS = torch.arange(256)
READ = [
    (case("aten.mul.Tensor", wide(), wide()), (0,)), (case("aten.mul.Tensor", wide(), wide()), (0, 1)),
    (case("aten.div.Tensor", wide(), wide()), (0,)), (case("aten.div.Tensor", wide(), wide()), (1,)),
    (case("aten.einsum.default", "ij,kj->ik", [wide(), wide()]), (1,)),
    (case("aten.einsum.default", "ij,kj->ik", [wide(), wide()]), (0, 1)),
    (case("aten.einsum.default", "...i,ij", [torch.randn(4, 5, 6), torch.randn(6, 7)]), (0, 1)),
    (case("aten.einsum.default", "bij,bij->bij", [torch.randn(4, 5, 6), torch.randn(4, 5, 6)]), (0, 1)),
    (case("aten.tril.default", wide()), (0,)),
    (case("aten.triu.default", wide()), (0,)), (case("aten.rsub.Scalar", wide(), 1.0), (0,)),
    (case("aten.lerp.Scalar", wide(), wide(), 0.3), (0, 1)), (case("aten.max.other", wide(), wide()), (0, 1)),
    (case("aten.max.default", wide()), (0,)), (case("aten.max.dim", wide(), 1), (0,)),
    (case("aten.gather.default", wide(), 1, torch.zeros(256, 8, dtype=torch.int64)), (0,)),
    (case("aten.index_add.default", wide(), 0, ROWS, wide()), (0, 2)),
    (case("aten.scatter_add.default", wide(), 1, torch.zeros(256, 512, dtype=torch.int64), wide()), (0, 2)),
    (case("aten.index_put.default", wide(), [ROWS], wide()), (0, 2)),
    (case("aten.select_scatter.default", wide(), torch.randn(512), 0, 3), (0, 1)),
    (case("aten.slice_scatter.default", wide(), torch.randn(128, 512), 0, 0, 128), (0, 1)),
    (case("aten.sort.default", wide()), (0,)), (case("aten.topk.default", wide(), 4), (0,)),
    (case("aten.conv_transpose1d.default", torch.randn(4, 6, 9), torch.randn(6, 7, 3)), (0, 1))]


@pytest.mark.parametrize(("one", "needs"), READ, ids=str)
def test_what_backward_reads_is_what_autograd_saves(one: Case, needs: tuple[int, ...]) -> None:
    """In bytes, and which of the inputs, each storage once."""
    leaves, found = [x.clone().requires_grad_(k in needs) for k, x in enumerate(one.values)], dict[int, Tensor]()

    def write(x: Tensor) -> Tensor:
        return found.setdefault(x.untyped_storage().data_ptr(), x)

    with torch.autograd.graph.saved_tensors_hooks(write, lambda x: x):
        made = one.fn(*fill(one.args, leaves), **fill(one.kwargs, leaves))
    reads = tuple(Value(k, t.shape, contiguous(t.shape), t.itemsize) for k, t in enumerate(one.inputs))
    outputs = one.outputs
    call = LocalOp(one.op, reads, tuple(t.shape for t in outputs), tuple(t.itemsize for t in outputs), needs)
    held = footprint_of(call)
    nbytes = sum(reads[k].nbytes for k in held.saves) + sum(outputs[k].nbytes for k in held.keeps) + held.extra
    assert nbytes + sum(size for _, size in held.copies) == sum(x.untyped_storage().nbytes() for x in found.values())
    flows = frozenset(needs) | {t for t in one.op.outputs if one.graph.tensors[t].is_floating}
    assert [keeps_input(one.op, k, one.graph, flows) for k in range(len(leaves))] == [
        x.untyped_storage().data_ptr() in found for x in leaves]
    del made


def test_an_einsum_of_heads_side_by_side_saves_copies() -> None:
    one, saved = case("aten.einsum.default", "bthd,bshd->bhts", [torch.randn(2, 8, 4, 6), torch.randn(2, 8, 4, 6)]), 0

    def write(x: Tensor) -> Tensor:
        nonlocal saved
        saved += x.nbytes * all(x.data_ptr() != leaf.data_ptr() for leaf in leaves)
        return x

    leaves = [x.clone().requires_grad_() for x in one.values]
    with torch.autograd.graph.saved_tensors_hooks(write, lambda x: x):
        one.fn(*fill(one.args, leaves))
    reads = tuple(Value(k, t.shape, contiguous(t.shape), t.itemsize) for k, t in enumerate(one.inputs))
    made = footprint_of(LocalOp(one.op, reads, (one.outputs[0].shape,), (4,), (0, 1)))
    assert made.saves == () and sum(size for _, size in made.copies) == saved == 2 * reads[0].nbytes
