"""A module that uses torch.autocast inside is cast as it says, in every recipe, and runs so on ranks.

The lists are CUDA's. On the operators that both devices cast alike, a module under the CPU's autocast is the truth, to
the bit.
"""

import re
from pathlib import Path

import pytest
import torch
from planmaker import cluster_of
from regions import KINDS, regions
from shell import ROOT
from torch import Tensor, nn
from verified import verified

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.capture.factory import Factory
from autoddl.capture.materialize import arguments
from autoddl.capture.rewrites.autocast import HIGHER, LOWER, WIDEST
from autoddl.capture.sample import as_sample
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.graph import Kind
from autoddl.core.precision import Precision

MIXED = Precision("bf16-mixed")


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_module_does_what_the_module_does(kind: str) -> None:
    model, x = regions(kind)
    made = capture(model, x)
    loss, truth = made.program(*arguments(model, as_sample(x), made))[0], model(x)
    assert float(loss.detach()) == float(truth.detach())
    found, wanted = _gradients(model, loss), _gradients(model, truth)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        apart = kind == "entered twice" and name.startswith("second.")  # two casts there, one here
        torch.testing.assert_close(gradient, wanted[name], rtol=2 ** -6 * apart, atol=2 ** -14 * apart)
    assert sorted({str(t.dtype) for t in made.graph.tensors}) == ["bfloat16", "float32"]


def _dtypes(made: Captured, name: str) -> list[list[str]]:
    return [[made.graph.tensors[t].dtype for t in op.inputs] for op in made.graph.ops if f".{name}." in op.target]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "decorated"])
def test_the_device_of_a_region_makes_no_difference(kind: str) -> None:
    graphs = [capture(*regions(kind, device)).graph for device in ("cpu", "cuda")]
    assert graphs[0].fingerprint() == graphs[1].fingerprint()


def test_weights_are_cast_before_they_are_gathered() -> None:
    graph = capture(*regions("nested")).graph
    found = {t.fqn: (t.dtype, t.stored.dtype, t.gradient.dtype) for t in graph.tensors if t.kind is Kind.PARAMETER}
    assert graph.mixed and found["second.weight"] == ("bfloat16", "float32", "float32")
    assert found["first.weight"] == found["third.weight"] == ("float32", "float32", "float32")


def test_bf16_mixed_computes_as_written_where_autocast_is_disabled() -> None:
    made = capture(*regions("nested"), MIXED)
    first, second, third, again, last = _dtypes(made, "linear")
    assert {*first, *second, *again, *last[:1]} == {"bfloat16"} and {*third} == {"float32"}
    assert last == ["bfloat16"] * 3
    kept = {t.fqn for t in made.graph.tensors if t.kind is Kind.PARAMETER and t.dtype == "float32"}
    assert kept == {"third.weight", "third.bias"}


class Reads(nn.Module):
    """Disables autocast for a product of two dtypes, or asks for it."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide, self.line, self.last = wide, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(x)
        if torch.is_autocast_enabled("cpu") or self.wide:
            with torch.autocast("cpu", enabled=False):
                y: Tensor = self.last(x.float() if self.wide else x)
                return y.square().mean()
        loss: Tensor = self.last(x).square().mean()
        return loss


def test_a_module_may_ask_whether_autocast_is_enabled() -> None:
    plain, mixed = (capture(Reads(True), torch.randn(4, 8), recipe) for recipe in (Precision(), MIXED))
    assert _dtypes(plain, "linear") == [["float32"] * 3] * 2
    assert _dtypes(mixed, "linear") == [["bfloat16"] * 3, ["float32"] * 3]
    capture(Reads(False), torch.randn(4, 8))
    with pytest.raises(CaptureError, match=r"linear at .*test_autocast_regions\.py:\d+ reads values of several dtypes"):
        capture(Reads(False), torch.randn(4, 8), MIXED)
    assert not torch.is_autocast_enabled("cpu")


def test_a_device_without_a_peak_is_one_error() -> None:
    with pytest.raises(InputError, match=r"second.weight under torch.autocast in bfloat16, for which .* lists no peak"):
        autoddl.plan(*regions()[:1], str(ROOT / "examples" / "clusters" / "laptop.yaml"), regions()[1])


@pytest.mark.ranks
@pytest.mark.slow
def test_a_plan_of_regions_computes_what_one_process_does() -> None:
    factory = Factory(str(ROOT / "tests" / "support" / "regions.py"), "nested", {})
    model, x = factory.build()
    pins = ["second.weight: net=O", "first.weight: net=OGW", "third.weight: node=S(0)"]
    plan = autoddl.plan(model, cluster_of("net=2,node=2"), x, factory=factory.to_json(), mesh="net=2,node=2", pins=pins)
    checked = verified(plan, factory)
    assert checked.passed and checked.collective_mismatches == 0 and 0 < checked.twice_error < 1e-6, checked
    assert any(c.tensor.startswith("p_second_weight") and c.forward for c in plan.conversions)


def test_the_lists_are_those_of_the_header_of_torch() -> None:
    """autocast_mode.h is installed with torch."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    text = text.replace("\\\n", " ")
    own = {"_convolution", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention",
           "index_put", "scatter_add"}
    for macro, ours in (("LOWER_PRECISION_FP", LOWER), ("FP32", HIGHER), ("FP32_SET_OPT_DTYPE", HIGHER),
                        ("PROMOTE", WIDEST)):
        found = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        assert found, macro
        names = {*re.findall(r"_\((\w+)", found[1])} - own
        assert len(names) > 5 and names <= ours, (macro, sorted(names - ours))
