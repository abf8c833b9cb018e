"""bf16-mixed casts where torch.autocast does, and a recipe's dtypes are those of parameters, values and gradients."""

from dataclasses import replace

import pytest
import torch
import zoo
from sampling import parametrize_or_slow
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import arguments
from autoddl.capture.rewrites.autocast import HIGHER, LOWER
from autoddl.capture.sample import as_sample
from autoddl.core.errors import InputError
from autoddl.core.graph import Kind, graph_from_text, graph_to_text
from autoddl.core.precision import RECIPES, Precision

MIXED = Precision("bf16-mixed")


def captured(name: str, recipe: Precision) -> Captured:
    model, sample = getattr(zoo, name)()
    return capture(model, sample, recipe)


@pytest.mark.ranks  # torch.testing asks uname for the processor
@pytest.mark.filterwarnings("ignore:Fail to import hypothesis:ImportWarning")
def test_the_lists_are_those_of_torch() -> None:
    pytest.importorskip("expecttest", reason="torch's own test lists import it")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    lists = AutocastTestLists(torch.device("cpu"))
    own = {"_convolution", "cudnn_convolution", "cudnn_convolution_transpose", "__matmul__", "__pow__"}
    for ours, theirs in ((LOWER, (lists.torch_fp16, lists.nn_fp16, lists.methods_fp16)),
                         (HIGHER, (lists.torch_fp32, lists.nn_fp32, lists.methods_fp32))):
        assert {row[0] for rows in theirs for row in rows} - own <= ours


@parametrize_or_slow("name", ["gpt", "resnet"], ["llama", "mixture"])
def test_operators_compute_in_the_dtypes_of_the_recipe(name: str) -> None:
    graph = captured(name, MIXED).graph
    for op in graph.ops:
        base = op.target.split(".")[1]
        dtypes = {graph.tensors[t].dtype for t in op.inputs if graph.tensors[t].is_floating}
        assert base not in LOWER or dtypes == {"bfloat16"}, op
        assert base not in HIGHER or dtypes <= {"float32"}, op
    assert graph.tensors[graph.outputs[0]].dtype == "float32"
    for old, new in graph.updates:
        assert graph.tensors[old].dtype == graph.tensors[new].dtype


def test_batch_norm_of_an_evaluated_module_keeps_its_statistics() -> None:
    model, sample = zoo.resnet()
    graph = capture(model.eval(), sample, MIXED).graph
    norms = [op for op in graph.ops if "batch_norm" in op.target]
    assert norms and all({graph.tensors[t].dtype for t in op.inputs[1:]} == {"float32"} for op in norms)


def test_parameters_have_masters_and_gradients_in_float32() -> None:
    for recipe, reduced in ((MIXED, "float32"), (Precision("bf16-mixed", "bfloat16"), "bfloat16")):
        parameters = [t for t in captured("resnet", recipe).graph.tensors if t.kind is Kind.PARAMETER]
        assert {t.stored.dtype for t in parameters} == {"float32"}
        assert {t.gradient.dtype for t in parameters} == {reduced}
        norms = {t.fqn for t in parameters if t.dtype == "float32"}
        assert norms and all(len(t.shape) == 1 for t in parameters if t.fqn in norms)


@pytest.mark.parametrize(("recipe", "dtype"), [("float32", "float32"), ("bf16", "bfloat16")])
def test_a_recipe_of_one_dtype_is_the_module_in_it(recipe: str, dtype: str) -> None:
    model, sample = zoo.llama(1, dtype=torch.bfloat16 if dtype == "float32" else torch.float32)
    found = capture(model, sample, Precision(recipe)).graph
    assert found.fingerprint() == capture(model.to(getattr(torch, dtype)), sample).graph.fingerprint()


def test_a_mixed_program_computes_nearly_what_the_module_does() -> None:
    torch.manual_seed(0)
    model, sample = zoo.gpt()
    mixed, batch = capture(model, sample, MIXED), as_sample(sample)
    loss = mixed.program(*arguments(model, batch, mixed))[0]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        truth = model(*batch.args, **batch.kwargs)
    truth.backward()
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), rel=2e-3)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, p in model.named_parameters():
        assert p.grad is not None and float((p.grad - gradients[name]).abs().max()) < 0.05 * largest, name


class Scatters(nn.Module):
    """Writes products into float32 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        rows = torch.zeros(8, 8).index_put((at,), self.line(x)) + torch.stack([self.line(x), x]).sum(0)
        return rows.square().mean()


def test_what_takes_one_dtype_is_given_the_widest() -> None:
    made = capture(Scatters(), (torch.randn(8, 8), torch.arange(8)), MIXED)
    (put,) = [op for op in made.graph.ops if "index_put" in op.target]
    assert made.graph.tensors[put.outputs[0]].dtype == "float32"


class Masked(nn.Module):
    """Masks scores by the least number of the dtype that they have, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        loss: Tensor = scores.masked_fill(x < 0, torch.finfo(scores.dtype).min).softmax(-1).square().sum()
        return loss


def test_the_least_number_of_float32_is_bfloat16s_in_a_mask_of_it() -> None:
    torch.manual_seed(0)
    module, x = Masked(), torch.randn(4, 8)
    mixed = capture(module, x, MIXED)
    op = next(op for op in mixed.graph.ops if op.name == "masked_fill")
    assert dict(op.args)["value"] == torch.finfo(torch.bfloat16).min
    with torch.autocast("cpu", torch.bfloat16):
        truth = module(x)
    found = mixed.program(*arguments(module, as_sample(x), mixed))[0]
    torch.testing.assert_close(found, truth, rtol=2e-2, atol=1e-2, check_dtype=False)


def test_the_text_of_a_graph_keeps_masters() -> None:
    graph = captured("gpt", Precision("bf16-mixed", "bfloat16")).graph
    again = graph_from_text(graph_to_text(graph))
    assert again == graph and again.fingerprint() == graph.fingerprint()
    plain = replace(graph, tensors=tuple(replace(t, master="") for t in graph.tensors))
    assert plain.fingerprint() != graph.fingerprint()


def test_a_recipe_is_text() -> None:
    for text in (*RECIPES, "bf16-mixed,reduce=bfloat16"):
        assert str(Precision.parse(text)) == text
    assert Precision.parse("bf16-mixed, reduce=float32") == MIXED


@pytest.mark.parametrize(("text", "said"), [
    ("fp8", "there are as-written, float32, bf16-mixed, bf16"), ("bf16,reduce=bfloat16", "only bf16-mixed"),
    ("bf16-mixed,reduce=int8", "float32 or bfloat16"), ("bf16-mixed,bfloat16", "written like")])
def test_another_recipe_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Precision.parse(text)
