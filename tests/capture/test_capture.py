"""Capture: the program is the model, bit for bit, and the graph says what the program does."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._traceback import CapturedTraceback

from autoddl.capture.capture import Captured, capture
from autoddl.capture.patches.torch_export_patch import shorten_stacks
from autoddl.capture.sample import Sample, as_sample, describe, from_spec, named, sample_for
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.graph import Kind, graph_from_text, graph_to_text
from autoddl.operators.rules.infinite import infinite_tensors


def values(captured: Captured, model: nn.Module, sample: Sample) -> list[Tensor]:
    """What the program is called with."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers()), **named(model.forward, sample)}
    leaves = [t for t, tensor in enumerate(captured.graph.tensors) if tensor.kind is not Kind.RESULT]
    assert leaves == list(range(len(leaves)))
    return [captured.constants[t] if t in captured.constants else found[captured.graph.tensors[t].fqn] for t in leaves]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads add up scattered gradients in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(model: nn.Module, sample: Sample) -> Captured:
    """Loss, gradients and new buffers of the program are those of the model."""
    eager = copy.deepcopy(model)
    captured = capture(model, sample)
    results = captured.program(*values(captured, model, sample))
    loss = eager(*sample.args, **dict(sample.kwargs))
    results[0].backward()
    loss.backward()
    assert torch.equal(results[0], loss)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), name
    after = dict(eager.named_buffers())
    for (buffer, _), new in zip(captured.graph.updates, results[len(captured.graph.outputs):], strict=True):
        assert torch.equal(new, after[captured.graph.tensors[buffer].fqn])
    return captured


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.LazyLinear(8), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()  # type: ignore[no-any-return]


def test_a_lazy_module_is_captured_once_it_has_seen_a_batch() -> None:
    model, x = Lazy(), torch.randn(4, 3)
    with pytest.raises(CaptureError, match=r"Lazy has no shape yet for up\.weight and 5 more.*call the model once"):
        capture(model, x)
    model(x)
    assert check(model, Sample((x,))).graph.tensors[0].shape == (8, 3)


def targets(captured: Captured) -> list[str]:
    return [op.target for op in captured.graph.ops]


@parametrize_or_slow("name", ["gpt", "llama-1", "t5-1", "mixture-1", "vgg_bn", "resnet"],
                     sorted({*zoo.ZOO} - {"gpt", "vgg_bn", "resnet"}))
def test_program_is_the_model(name: str, one_thread: None) -> None:
    captured = check(*zoo.named(name))
    assert not any(part in target for target in targets(captured) for part in ("clone", "alias", "view", "getitem"))
    assert all(captured.graph.tensors[t].kind is Kind.RESULT for op in captured.graph.ops for t in op.outputs)
    assert all(op.source for op in captured.graph.ops)


def test_evaluation_mode(one_thread: None) -> None:
    model, sample = zoo.resnet()
    assert not check(model.eval(), sample).graph.updates


def test_tied_parameters_are_one_tensor() -> None:
    model, sample = zoo.gpt(tied=True)
    captured = capture(model, sample)
    (tied,) = (tensor for tensor in captured.graph.tensors if tensor.aliases)
    assert tied.fqn == "tokens.weight" and tied.aliases == ("head.weight",) and tied.trained
    names = [tensor.fqn for tensor in captured.graph.tensors if tensor.kind is Kind.PARAMETER]
    assert names == [name for name, _ in model.named_parameters()]


class Everything(nn.Module):
    """Unused and frozen parameters, buffers of both kinds, constants, in-place writes, no_grad and detach."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.shift = torch.arange(4.0)

    def forward(self, batch: dict[str, Tensor], flag: bool = False, *, power: int = 1) -> dict[str, Tensor]:
        self.steps += 1
        y = self.linear(batch["x"]) * self.scale + self.frozen
        with torch.no_grad():
            size = y.abs().mean()
        z = y.detach() * 2
        y[:, 0] = 0.0
        y += self.shift / size + z * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"loss": (y**power).sum(), "y": y}


def test_everything_at_once() -> None:
    torch.manual_seed(0)
    model = Everything()
    sample = Sample(({"x": torch.randn(3, 4)},), {"power": 2})
    eager, captured = copy.deepcopy(model), capture(model, sample)
    loss, _, steps = captured.program(*values(captured, model, sample))
    expected = eager(*sample.args, **dict(sample.kwargs))["loss"]
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected) and steps == 1
    assert torch.equal(model.linear.weight.grad, eager.linear.weight.grad)  # type: ignore[arg-type]
    kinds = {tensor.fqn: (tensor.kind, tensor.trained) for tensor in captured.graph.tensors if tensor.fqn}
    assert kinds["unused.weight"] == (Kind.PARAMETER, True) and kinds["frozen"] == (Kind.PARAMETER, False)
    assert kinds["scale"][0] is Kind.BUFFER and kinds["shift"][0] is Kind.CONSTANT and kinds["batch.x"][0] is Kind.INPUT
    assert targets(captured).count("aten.detach.default") == 2


def test_the_users_module_is_untouched() -> None:
    model = Everything()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    capture(model, Sample(({"x": torch.randn(3, 4)},)))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])


def test_dropout_is_numbered_and_vanishes() -> None:
    model, sample = zoo.gpt(dropout=0.1)
    captured = capture(model, sample)
    keys = [op.arg("key" if op.target == "autoddl.dropout" else "dropout_key") for op in captured.graph.ops
            if op.target in ("autoddl.dropout", "autoddl.attention")]
    assert keys == list(range(6))
    inputs = values(captured, model, sample)
    assert torch.equal(captured.program(*inputs)[0], captured.program(*inputs)[0])
    for still in (capture(model.eval(), sample), capture(zoo.gpt(dropout=0.0)[0], sample)):
        assert not {"autoddl.dropout", "autoddl.attention"} & set(targets(still))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature, self.plain = nn.Dropout2d(0.5), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.feature(x)
        self.plain(y)
        return y.sum()


def test_feature_and_inplace_dropout() -> None:
    x = torch.ones(64, 16, 4, 4)
    captured = capture(Drops(), x)
    assert targets(captured).count("autoddl.dropout") == 2 and not {"bernoulli", "native"} & set(targets(captured))
    (total,) = captured.program(x)
    assert abs(total / x.numel() - 1) < 0.1


class Saturates(nn.Module):
    """Alpha dropout of elements, or of channels."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.drop(x)
        return y.sum(), y


@pytest.mark.parametrize("drop", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])
def test_alpha_dropout_keeps_mean_and_variance(drop: nn.Module) -> None:
    x = torch.randn(64, 256, 8, generator=torch.Generator().manual_seed(0))
    captured = capture(Saturates(drop), x)
    assert targets(captured).count("autoddl.dropout") == 1 and not {"bernoulli", "native"} & set(targets(captured))
    y = captured.program(x)[1]
    dropped = (y == y.flatten().mode().values).double()
    assert abs(y.mean()) < 0.02 and abs(y.var() - 1) < 0.02 and abs(dropped.mean() - 0.2) < 0.01
    assert (dropped.amin(2) == dropped.amax(2)).all() == isinstance(drop, nn.FeatureAlphaDropout)


def test_the_mean_loss_is_a_sum_over_a_weight() -> None:
    class Weighted(nn.Module):
        def forward(self, x: Tensor, y: Tensor, w: Tensor, reduction: str) -> Tensor:
            loss = F.cross_entropy(x, y, w, ignore_index=2, label_smoothing=0.1, reduction=reduction)
            return torch.sum(loss) if reduction == "none" else loss

    arguments = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 2, 4]), torch.rand(5)
    mean, total, none = (capture(Weighted(), (*arguments, kind)) for kind in ("mean", "sum", "none"))
    assert targets(mean) == ["autoddl.token_loss", "autoddl.token_weight", "aten.div.Tensor"]
    assert targets(total) == ["autoddl.token_loss"] and "aten.cross_entropy_loss.default" in targets(none)
    assert mean.graph.ops[0].slots == ("logits", "target", "weight") and mean.graph.ops[0].arg("ignore_index") == 2
    assert torch.allclose(mean.program(*arguments)[0], Weighted()(*arguments, "mean"))
    half = capture(Weighted(), (arguments[0].bfloat16(), arguments[1], arguments[2].bfloat16(), "mean"))
    assert half.graph.tensors[half.graph.outputs[0]].dtype == "bfloat16" and half.graph.tensors[3].dtype == "float32"


def test_arguments_are_plain_and_complete() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            a, b = torch.split(x, 2, dim=1)
            return torch.cat([a.to(torch.float64), b], 1)[:, i].sum() + x.topk(1)[0].sum()

    graph = capture(Model(), (torch.randn(3, 4), torch.tensor([0, 1]))).graph
    ops = {op.target: op for op in graph.ops}
    assert ops["aten.split.Tensor"].args == (("split_size", 2), ("dim", 1))
    assert len(ops["aten.split.Tensor"].outputs) == 2
    assert ops["aten.cat.default"].slots == ("tensors.0", "tensors.1")
    assert ops["aten._to_copy.default"].arg("dtype") == "float64"
    assert ops["aten.index.Tensor"].slots == ("self", "indices.1")
    assert ops["aten.index.Tensor"].arg("indices_none") == (True, False)
    assert len(ops["aten.topk.default"].outputs) == 2


def test_nodes_and_tensors_find_the_program() -> None:
    captured = capture(*zoo.gpt2())
    calls = {node.name: node for node in captured.program.graph.nodes}
    for op, name in zip(captured.graph.ops, captured.nodes, strict=True):
        keys: list[str | tuple[str, int]] = [name, *((name, k) for k in range(9))]
        found = [captured.tensors[key] for key in keys if key in captured.tensors]
        assert tuple(found) == op.outputs and name in calls


def test_source_and_module() -> None:
    captured = capture(*zoo.gpt())
    linears = [op for op in captured.graph.ops if op.target == "aten.linear.default"]
    assert linears[0].module == "blocks.0.q" and "zoo.py:" in linears[0].source
    assert linears[-1].module == "head"


def test_a_stack_without_torch_names_the_same_lines() -> None:
    """`shorten_stacks` gives torch its own back."""
    whole, module = CapturedTraceback.summary, nn.Sequential(nn.Linear(2, 3), nn.Tanh())

    def traced() -> list[str]:
        program = torch.export.export(module, (torch.zeros(1, 2),), strict=False)
        return [line_of(node.meta.get("stack_trace")) for node in program.graph.nodes]

    lines = traced()
    with shorten_stacks():
        assert CapturedTraceback.summary is not whole and traced() == lines and any(lines)
    assert CapturedTraceback.summary is whole


def test_meta_models_capture_alike() -> None:
    with torch.device("meta"):
        model, sample = zoo.llama()
    assert capture(model, sample).graph.fingerprint() == capture(*zoo.llama()).graph.fingerprint()


def llama8b(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
                         num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)
    with torch.device("meta"):
        ids = torch.zeros(16, 8192, dtype=torch.int64)
        model: Any = LlamaForCausalLM(config)
        return model.to(torch.bfloat16), {"input_ids": ids, "labels": ids, "use_cache": False}


@parametrize_or_slow("layers", [4], [32])
def test_llama_8b_on_meta(layers: int) -> None:
    began = time.perf_counter()
    graph = capture(*llama8b(layers)).graph
    assert time.perf_counter() - began < 60
    assert sum(t.numel for t in graph.tensors if t.kind is Kind.PARAMETER) == (
        8_030_261_248 - (32 - layers) * 218_112_000)
    causal = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default"]
    assert len(causal) == layers and all(op.arg("is_causal") and op.slot("attn_mask") is None for op in causal)


class Wrong(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Any:
        match self.kind:
            case "parameter":
                return nn.functional.embedding(torch.arange(4), self.weight, max_norm=1.0).sum()
            case "branch":
                return x.sum() if x.sum().item() > 0 else x.mean()
            case "number":
                return x.sum() * x.max().item()
            case "shape":
                return x[x > 0].sum()
            case "vector":
                return x
            case "nothing":
                return {"logits": x}
            case "input":
                return x.add_(1).sum()
            case "random":
                return (x + torch.empty_like(x).random_(0, 2**40)).sum()
            case "sizes":
                return (x @ torch.ones(3, 3)).sum()
            case "autocast":
                with torch.autocast("cpu", dtype=torch.float16):
                    return (x @ x).sum()


@pytest.mark.parametrize(("kind", "says"), [
    ("branch", r"values of a tensor.*test_capture\.py:\d+: return x\.sum\(\) if"),
    ("number", r"item.*test_capture\.py:\d+ makes a number"), ("shape", r"test_capture\.py:\d+ makes a shape"),
    ("vector", r"scalar loss.*\(4, 4\)"), ("nothing", "scalar loss.*no tensor"), ("input", "writes into its input x"),
    ("parameter", "writes into its parameter weight"),
    ("random", r"random.*test_capture\.py:\d+ draws whole numbers from"),
    ("sizes", r"test_capture\.py:\d+: return \(x @"),
    ("autocast", r"autocast at .*test_capture\.py:\d+ computes in float16")])
def test_what_cannot_be_captured(kind: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Wrong(kind), torch.randn(4, 4))
    assert capfd.readouterr() == ("", "")


def test_a_sample_must_fit() -> None:
    with pytest.raises(CaptureError, match=r"does not fit forward.*labels"):
        capture(zoo.gpt()[0], (torch.zeros(4, 16, dtype=torch.int64),))
    with pytest.raises(InputError, match="pass sample="):
        capture(zoo.gpt()[0])
    with pytest.raises(InputError, match="is no sample"):
        as_sample(3)


def test_samples_round_trip_as_json() -> None:
    nested = [None, (torch.ones(1, dtype=torch.int64), True)]
    sample = Sample((torch.zeros(2, 3), nested), {"x": {"y": torch.ones(4)}, "n": 3})
    spec = describe(sample)
    assert describe(from_spec(spec)) == spec and describe(from_spec(spec, "meta")) == spec
    assert from_spec(spec, "meta").args[0].is_meta


def test_hugging_face_models_bring_their_sample() -> None:
    model = zoo.llama()[0].model
    assert isinstance(model, nn.Module)
    captured = capture(model)
    assert captured.spec["kwargs"]["use_cache"] is False and len(captured.graph.outputs) == 2
    assert set(sample_for(model).kwargs) == {"input_ids", "labels", "use_cache"}
    assert capture(model, from_spec(captured.spec)).graph.fingerprint() == captured.graph.fingerprint()


class Cached(nn.Module):
    """Joins tensors to the empty ones that a cache of keys begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([torch.tensor([]), self.key(x)], -2)
        values = torch.cat([self.value(x).half(), torch.tensor([])], -2)
        joined = torch.cat([torch.tensor([]), keys, values], -2)
        return joined.square().mean() + torch.cat([torch.tensor([]), torch.tensor([])]).sum()


def test_nothing_joined_to_a_tensor_is_the_tensor(one_thread: None) -> None:
    captured = check(Cached(), Sample((torch.rand(2, 3, 4),)))
    joins = [op for op in captured.graph.ops if op.target == "aten.cat.default"]
    assert [len(op.inputs) for op in joins if captured.graph.tensors[op.inputs[0]].shape != (0,)] == [2]


class Masked(nn.Module):
    """Scores with an additive mask in a buffer and one in the batch, scaled after both."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8,), 0.0).index_fill(0, torch.tensor([0]), -torch.inf))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.linear(x)
        rows: Tensor = ((y + self.mask) * y.exp()).softmax(-1) + ((y + hidden) * y.exp()).softmax(-1)
        return rows.mean()


def test_infinities_of_buffers_and_batch_keep_from_products_with_partial_sums() -> None:
    x, hidden = torch.ones(4, 8), torch.zeros(4, 8)
    plain = capture(Masked(), Sample((x, hidden))).graph
    hidden = hidden.index_fill(1, torch.tensor([1]), torch.finfo(torch.float32).min)
    graph = capture(Masked(), Sample((x, hidden))).graph
    assert [t.fqn for t in graph.tensors if t.infinite] == ["mask", "hidden"]
    assert [t.fqn for t in plain.tensors if t.infinite] == ["mask"] and plain.fingerprint() == graph.fingerprint()
    assert graph_from_text(graph_to_text(graph)) == graph
    products = [op for op in graph.ops if op.target == "aten.mul.Tensor"]
    for made, counted in ((plain, [True, False]), (graph, [True, True])):
        infinite = infinite_tensors(made)
        assert [op.inputs[0] in infinite for op in products] == counted


def test_a_cache_in_the_output_is_refused_in_one_line_with_the_way_out() -> None:
    model, sample = zoo.gpt2()
    kwargs = {**sample.kwargs, "use_cache": True}
    with pytest.raises(CaptureError, match=r"returns its cache of keys and values .*: give use_cache=False") as caught:
        capture(next(model.children()), Sample(sample.args, kwargs))
    assert len(str(caught.value).splitlines()) == 1
