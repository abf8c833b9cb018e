"""A branch of which one side only raises goes the other way, and its condition is checked in every step."""

import ast
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import arguments, limits
from autoddl.capture.rewrites.finite_clamps import is_finite_clamp
from autoddl.capture.sample import as_sample
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.precision import Precision

Ids = tuple[Tensor, Tensor]


class Checked(nn.Module):
    """Labels are below 9, ids are not negative, and weights are finite."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 4), nn.Linear(4, 12)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if labels is not None and labels.max() >= 9:
            raise ValueError("labels are too large")
        assert (ids >= 0).all(), "ids are negative"
        h = self.head(self.norm(self.table(ids)))
        if torch.isfinite(h).all():
            pass
        else:
            raise ValueError("not finite")
        return F.cross_entropy(h, labels)


def batch() -> Ids:
    return torch.arange(6), torch.arange(6) % 9


def run(model: nn.Module, captured: Captured, ids: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = captured.program(*arguments(model, as_sample((ids, labels)), captured))[0]
    return found


@pytest.mark.parametrize("norm", [False, True])
def test_a_right_batch_passes_and_a_wrong_one_is_an_error(norm: bool) -> None:
    model = Checked(norm)
    captured = capture(model, batch())
    torch.testing.assert_close(run(model, captured, *batch()), model(*batch()))
    ids, labels = batch()
    with pytest.raises(InputError, match=r"branches.py:\d+: labels is not None and labels.max\(\) >= 9 is"):
        run(model, captured, ids, labels + 9)
    with pytest.raises(InputError, match=r"test_raising_branches.py:\d+: \(ids >= 0\).all\(\) is False"):
        run(model, captured, ids - 1, labels)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(InputError, match=r"torch.isfinite\(h\).all\(\) is False"):
        run(model, captured, ids, labels)


def test_checks_stand_before_what_reads_the_values() -> None:
    model = Checked(False)
    graph = capture(model, batch()).graph
    labels, ids, loss = [op for op in graph.ops if op.target == "autoddl.checked"]
    read = {t: op.target for op in graph.ops for t in op.inputs}
    assert read[labels.outputs[0]].startswith("autoddl.token") and read[ids.outputs[0]] == "aten.embedding.default"
    assert graph.outputs[0] == loss.outputs[0] and limits(graph) == {"ids": 12, "labels": 12}
    assert capture(model, batch(), Precision.parse("bf16-mixed")).graph.ops


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.layer(x)).mean()


def warns(x: Tensor) -> Tensor:
    if x.max() > 1e9:
        print("large")
    return x


def decides(x: Tensor) -> Tensor:
    if x.max() > 0:
        return x
    return -x


def mixes(x: Tensor) -> Tensor:
    if x.max() > 1e9 or not x.min() < 1e9:
        raise ValueError
    return x


def clamps(x: Tensor) -> Tensor:
    if torch.isinf(x).any():
        x = torch.clamp(x, -1e4, 1e4)
    return x


def takes_numbers_out(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 100 or largest < -100:
        raise ValueError(f"{largest} is too large")
    if x.min().item() < -100:
        raise ValueError
    return x


def keeps_a_number(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 100:
        raise ValueError
    return x * largest


def test_numbers_that_only_raising_branches_read_are_checked_in_the_step() -> None:
    model = Asks(takes_numbers_out)
    captured = capture(model, torch.ones(2, 4))
    checks = [op.arg("text") for op in captured.graph.ops if op.target == "autoddl.checked"]
    assert len(checks) == 3 and all("item()" in str(text) or "largest" in str(text) for text in checks)
    values = [p.detach() for p in model.parameters()]
    assert torch.equal(captured.program(*values, torch.ones(2, 4))[0], model(torch.ones(2, 4)))
    with pytest.raises(InputError, match="largest > 100 or largest < -100"):
        captured.program(values[0], values[1] + 1000, torch.ones(2, 4))
    with pytest.raises(InputError, match=r"largest < -100|x\.min"):
        captured.program(values[0], values[1] - 1000, torch.ones(2, 4))


def test_a_number_that_is_used_elsewhere_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"item.* makes a number|values of a tensor"):
        capture(Asks(keeps_a_number), torch.ones(2, 4))


def test_a_warning_is_left_out() -> None:
    assert not [op for op in capture(Asks(warns), torch.ones(2, 4)).graph.ops if op.target == "autoddl.checked"]


def fills(x: Tensor) -> Tensor:
    mask = x > 1
    if mask.any():
        x[mask] = 0.0
    if torch.any(mask):
        x.masked_fill_(mask, -float("1"))
    return x


def pads(x: Tensor) -> Tensor:
    pad_mask, attention_mask = x > 1, x > -1
    if not pad_mask.any():
        pad_mask = None  # type: ignore[assignment]
    if attention_mask is not None and attention_mask.all():
        attention_mask = None  # type: ignore[assignment]
    x = x if pad_mask is None else x.masked_fill(pad_mask, 0.0)
    return x if attention_mask is None else x.masked_fill(~attention_mask, 0.0)


def indexes(x: Tensor) -> Tensor:
    rows = (x > 1).sum(-1)
    if rows.any():
        x[rows] = 0.0
    return x


def spreads(x: Tensor) -> Tensor:
    mask, y = x > 1, x.mean(0)
    if mask.any():
        y = y.masked_fill(mask, 0.0)
    return y


def divides(x: Tensor) -> Tensor:
    mask = x > 1
    total = x.sum() / mask.sum()
    if mask.any():
        x[mask] = total
    return x


def drops(x: Tensor) -> Tensor:
    keep: Tensor | None = x > 1
    if not keep.any():  # type: ignore[union-attr]
        keep = None
    return x if keep is None else x * keep


@pytest.mark.parametrize("ask", [fills, pads])
@pytest.mark.parametrize("value", [0.5, 9.0])
def test_a_side_that_is_right_for_every_mask_is_taken(ask: Callable[[Tensor], Tensor], value: float) -> None:
    model, x = Asks(ask), torch.full((2, 4), value)
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(4))
        model.layer.bias.copy_(torch.tensor([0.0, 0.0, 0.0, value / 2]))
    captured = capture(model, x)
    found = captured.program(*arguments(model, as_sample(x), captured))[0]
    assert torch.equal(found, model(x))
    ours, theirs = (torch.autograd.grad(y, list(model.parameters())) for y in (found, model(x)))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("ask", "line"), [(decides, r"if x.max\(\) > 0:"), (mixes, r"or not x.min\(\)"),
                                           (clamps, r"if torch.isinf\(x\).any\(\):"),
                                           (indexes, r"if rows.any\(\):"),
                                           (spreads, r"if mask.any\(\):"),
                                           (divides, r"if mask.any\(\):"), (drops, "if not keep.any")])
def test_a_branch_that_decides_is_refused_with_its_condition(ask: Callable[[Tensor], Tensor], line: str) -> None:
    with pytest.raises(CaptureError, match=rf"decides by the values of a tensor.*{line}") as caught:
        capture(Asks(ask), torch.ones(2, 4))
    assert "experts" not in str(caught.value)


class Clamped(nn.Module):
    """Keeps its values finite, and leaves its layer out with a probability, as transformers writes both."""

    def __init__(self, dropped: float, less: float = 0.0) -> None:
        super().__init__()
        self.layer, self.dropped, self.less = nn.Linear(4, 4), dropped, less

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        if self.less:
            drawn.sub_(self.less)
        skips = self.training and drawn < self.dropped
        if not skips:
            x = self.layer(x)
        if not torch.isfinite(x).all():
            bound = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-bound, max=bound)
        return x.mean()


def test_a_branch_that_clamps_what_is_not_finite_is_always_taken() -> None:
    model, x = Clamped(0.0), torch.arange(8.0).view(2, 4)
    captured = capture(model, x)
    program = captured.program
    assert "aten.clamp.default" in [op.target for op in captured.graph.ops]
    assert torch.equal(program(*model.parameters(), x)[0], model(x))
    huge = torch.full((2, 4), torch.inf)
    with torch.no_grad():
        model.layer.weight.abs_()
    assert torch.equal(program(*model.parameters(), huge)[0], model(huge))


@pytest.mark.parametrize(("condition", "bound", "taken"), [
    ("not torch.isfinite(x).all()", "{}", True), ("x.dtype == h and torch.isinf(x).any()", "{} - 1000", True),
    ("torch.isinf(x).any() or torch.isnan(x).any()", "{}", True),
    ("x.isinf().any()", "{}", True), ("~x.isinf().any()", "{}", False),
    ("torch.isinf(x).any()", "1e4", False), ("torch.isinf(x).any()", "{} - 1e38", False),
    ("torch.isinf(x).any()", "torch.finfo(y.dtype).max", False), ("torch.isinf(y).any()", "{}", False),
    ("torch.isnan(x).any()", "{}", False), ("torch.isfinite(x).all()", "{}", False),
    ("torch.isinf(x).any() or (y > 3).all()", "{}", False), ("y.any() and torch.isinf(x).any()", "{}", False)])
def test_a_clamp_is_always_taken_only_where_it_leaves_finite_values(condition: str, bound: str, taken: bool) -> None:
    bound = bound.format("torch.finfo(x.dtype).max")
    for body in (f"b = {bound}; x = torch.clamp(x, min=-b, max=b)", f"x = torch.clamp(x, -({bound}), {bound})"):
        assert is_finite_clamp(cast(ast.If, ast.parse(f"if {condition}: {body}").body[0])) is taken
    for other in ("min=0", f"{bound}, {bound}"):
        assert not is_finite_clamp(cast(ast.If, ast.parse(f"if {condition}: x = torch.clamp(x, {other})").body[0]))


def test_a_layer_that_is_left_out_by_a_draw_is_refused_unless_it_never_is() -> None:
    with pytest.raises(CaptureError, match=r"raising_branches.py:\d+: if not skips.*layerdrop=0"):
        capture(Clamped(0.1), torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"raising_branches.py:\d+: if not skips.*layerdrop=0"):
        capture(Clamped(0.0, less=0.5), torch.ones(2, 4))
