"""What is around a module is traced, said in a line, or refused: a case for each row of docs/capture.md."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from shell import FACTORY, LAPTOP, shell
from tiny import Tiny, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import CaptureError
from autoddl.core.graph import Kind

Wrap = Callable[[Tiny], nn.Module]
PAGE = Path(__file__).parents[2] / "docs" / "capture.md"


class Checkpointed(nn.Module):
    """A tiny model whose blocks are checkpointed."""

    def __init__(self, model: Tiny, reentrant: bool = False) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.model.tokens(ids)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.model.head(x).flatten(0, 1), labels.flatten())


class Bound(Checkpointed):
    """Checkpoints as layers of Hugging Face do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = checkpoint(partial(type(self.model.blocks[1]).forward, self.model.blocks[1]), self.model.tokens(ids),
                       use_reentrant=False)
        loss: Tensor = self.model.head(x).mean()
        return loss


class Hooked(Checkpointed):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.model.tokens(ids)
        x.register_hook(lambda gradient: gradient * 2)
        loss: Tensor = self.model.head(x).mean()
        return loss


class Cast(Checkpointed):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = self.model(ids, labels)
        return loss


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _with(change: Callable[[Tiny], object]) -> Wrap:
    """The model after a change in place."""
    def wrap(model: Tiny) -> nn.Module:
        change(model)
        return model
    return wrap


def _instance(model: Tiny) -> None:
    before = model.blocks[0].forward
    model.blocks[0].forward = lambda x: before(x) * 2


def _compiled_block(model: Tiny) -> None:
    model.blocks[0] = _compiled(model.blocks[0])


def _compiled(module: nn.Module) -> nn.Module:
    made: object = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def captured(wrap: Wrap) -> Captured:
    made = tiny(dropout=0.0)
    assert isinstance(made, Tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(wrap(made), made.example_inputs())


def _doubles(found: Captured) -> None:
    assert any(op.target == "aten.mul.Tensor" for op in found.graph.ops) and not found.notes


def _original(found: Captured) -> None:
    trained = {t.fqn for t in found.graph.tensors if t.kind is Kind.PARAMETER and t.trained}
    assert any("original" in name or "weight_orig" in name for name in trained) and "head.weight" not in trained
    assert not found.notes


NORMS: list[Wrap] = [_with(lambda m: parametrizations.weight_norm(m.head)),
                     _with(lambda m: parametrizations.spectral_norm(m.head)),
                     _with(lambda m: parametrize.register_parametrization(m.head, "weight", Doubled())),
                     _with(lambda m: prune.l1_unstructured(m.head, "weight", 0.5))]

CASES: dict[str, list[tuple[Wrap, str | Callable[[Captured], None]]]] = {
    "`torch.utils.checkpoint`, `use_reentrant=False`": [
        (Checkpointed, lambda c: _says(c, "model.blocks.0 and 1 more are in torch.utils.checkpoint")),
        (Bound, lambda c: _says(c, "model.blocks.1 is in torch.utils.checkpoint"))],
    "`torch.utils.checkpoint`, `use_reentrant=True`": [(lambda m: Checkpointed(m, True), "backward of its own")],
    "`torch.compile(model)`, `torch.compile(block)`, `module.compile()`": [
        (_compiled, lambda c: _says(c, "the model is compiled")),
        (_with(_compiled_block), lambda c: _says(c, "blocks.0 is compiled")),
        (_with(lambda m: m.blocks[1].compile(backend="eager")), lambda c: _says(c, "blocks.1 is compiled"))],
    "forward hook, forward pre-hook": [
        (_with(lambda m: m.blocks[0].register_forward_hook(lambda module, x, y: y * 2)), _doubles),
        (_with(lambda m: m.blocks[0].register_forward_pre_hook(lambda module, x: (x[0] * 2,))), _doubles)],
    "backward hook, backward pre-hook": [
        (_with(lambda m: m.blocks[0].register_full_backward_hook(lambda *_: None)), "blocks.0 has a backward hook"),
        (_with(lambda m: m.blocks[0].register_full_backward_pre_hook(lambda *_: None)), "blocks.0 has a backward")],
    "hook on a parameter's gradient": [
        (_with(lambda m: m.head.weight.register_hook(lambda g: g)), "head.weight has a hook on its gradient")],
    "hook after a parameter's gradient was accumulated": [
        (_with(lambda m: m.head.weight.register_post_accumulate_grad_hook(lambda p: None)), "head.weight has a hook")],
    "hook on a gradient, registered in forward": [(Hooked, "registers a hook on a gradient")],
    "parametrization, `weight_norm`, `spectral_norm`, pruning": [(wrap, _original) for wrap in NORMS],
    "a forward put on an instance": [(_with(_instance), "the forward of blocks.0 reads weights of another copy")],
    "`DataParallel`, `DistributedDataParallel`, FSDP": [(nn.DataParallel, "the model is wrapped in DataParallel")],
    "`ScriptModule`": [(_with(lambda m: setattr(m, "head", torch.jit.script(m.head))), "head is a ScriptModule")],
    "`requires_grad_(False)`": [
        (_with(lambda m: m.head.requires_grad_(False)), lambda c: _untrained(c, "head.weight"))],
    "`eval()`": [(lambda m: tiny(dropout=0.5).eval(), lambda c: _lacks(c, "dropout"))],
    "`torch.autocast` in forward": [
        (Cast, lambda c: _has(c, "bfloat16"))],
    "`no_sync()`": [],
}
"""By row of the table, models with what happens to them: part of the error, or a check of what was captured."""


def _says(found: Captured, words: str) -> None:
    assert len(found.notes) == 1 and found.notes[0].startswith(words), found.notes


def _untrained(found: Captured, name: str) -> None:
    assert next(t for t in found.graph.tensors if t.fqn == name).trained is False


def _lacks(found: Captured, word: str) -> None:
    assert not any(word in op.target for op in found.graph.ops)


def _has(found: Captured, dtype: str) -> None:
    assert any(t.dtype == dtype for t in found.graph.tensors)


def test_every_row_of_the_page_has_a_case() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if row not in ("what", "---")] == list(CASES)


@pytest.mark.parametrize(("row", "k"), [(row, k) for row, cases in CASES.items() for k in range(len(cases))])
def test_what_is_around_a_module_is_traced_said_or_refused(row: str, k: int) -> None:
    wrap, expected = CASES[row][k]
    if isinstance(expected, str):
        with pytest.raises(CaptureError, match=re.escape(expected)):
            captured(wrap)
    else:
        expected(captured(wrap))


def checkpointed() -> nn.Module:
    made = tiny(dropout=0.0)
    assert isinstance(made, Tiny)
    model = Checkpointed(made)
    model.example_inputs = made.example_inputs  # type: ignore[assignment]
    return model


def test_the_plan_says_what_it_leaves_out() -> None:
    said = shell("plan", f"{__file__}:checkpointed", LAPTOP)
    assert said.code == 0, said.err
    assert "left out" in said.out and "it chooses itself what backward computes again" in said.out
    assert "left out" not in shell("plan", FACTORY, LAPTOP).out
