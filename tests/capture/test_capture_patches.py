"""Each patch that capture makes does what its file says while it is open, and is undone afterwards, also on errors."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, fx, nn
from torch.nn.attention import flex_attention as library
from torch.utils._traceback import CapturedTraceback

from autoddl.capture.capture import capture
from autoddl.capture.materialize import arguments
from autoddl.capture.patches.autograd_function_patch import replace_apply
from autoddl.capture.patches.torch_export_patch import delay_code_generation, shorten_stacks
from autoddl.capture.patches.torch_flex_attention_patch import flex_attention_as_operator
from autoddl.capture.patches.torch_module_moves_patch import modules_stay
from autoddl.capture.patches.torch_reruns_patch import gradients_stay, modules_untraced
from autoddl.capture.patches.transformers_experts_patch import experts_as_operators
from autoddl.capture.patches.transformers_masks_patch import build_masks_as_run
from autoddl.capture.patches.transformers_switch_patch import switch_layers_as_operators
from autoddl.capture.sample import as_sample


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


def test_a_graph_module_writes_its_code_when_it_is_called() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    with delay_code_generation():
        module = fx.GraphModule(nn.Module(), graph)
        assert not hasattr(module, "_code")
        assert torch.equal(module(torch.ones(2)), -torch.ones(2)) and "neg" in module.code


def test_a_function_is_applied_as_the_trace_decides() -> None:
    with replace_apply(lambda function, apply, args, kwargs: (function, apply(*args))):
        function, found = Doubled.apply(torch.ones(2))  # type: ignore[no-untyped-call]
    assert function is Doubled and torch.equal(found, 2 * torch.ones(2))
    assert torch.equal(Doubled.apply(torch.ones(2)), found)  # type: ignore[no-untyped-call]


def test_a_function_whose_method_was_bound_before_is_applied_as_the_trace_decides() -> None:
    double = Doubled.apply
    with replace_apply(lambda function, apply, args, kwargs: (function, apply(*args))):
        function, found = double(torch.ones(2))  # type: ignore[no-untyped-call]
    assert function is Doubled and torch.equal(found, double(torch.ones(2)))  # type: ignore[no-untyped-call]


def test_masks_are_those_of_a_run_unless_positions_are_given() -> None:
    model, _ = zoo.llama()
    masking = sys.modules["transformers.masking_utils"]
    assert masking.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is not None
    with build_masks_as_run(model):
        assert not masking.is_torchdynamo_exporting()
        assert masking.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is None
        assert not masking.fast_all(torch.ones(2, dtype=torch.bool))


def test_releases_that_ask_whether_they_are_traced_build_the_masks_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.llama()
    masking = sys.modules["transformers.masking_utils"]
    monkeypatch.delattr(masking, "is_torchdynamo_exporting")
    monkeypatch.setattr(masking, "is_tracing", asks := lambda tensor=None: True)
    with build_masks_as_run(model):
        assert masking.is_tracing(torch.ones(2)) and not masking.is_tracing() and not masking.is_tracing(None)
        assert masking.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is None
    assert masking.is_tracing is asks


@pytest.mark.slow
def test_longt5_makes_the_mask_that_it_needs_as_in_a_run() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LongT5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
                                       local_radius=3, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    torch.manual_seed(0)
    model, ids = transformers.LongT5ForConditionalGeneration(config), torch.randint(1, 32, (2, 8))
    captured = capture(model, batch := {"input_ids": ids, "labels": ids})
    found = captured.program(*arguments(model, as_sample(batch), captured))[0]
    torch.testing.assert_close(found, model(**batch).loss)


class Moved(nn.Module):
    """Moves its parts to the device of its batch, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part.to(x.device)(x).sum()
        return found


def test_a_module_that_is_moved_to_where_it_is_stays() -> None:
    ops = capture(Moved(), torch.ones(2, 4)).graph.ops
    assert [op.target for op in ops] == ["aten.linear.default", "aten.sum.default"]


def patched() -> list[Any]:
    masking = sys.modules["transformers.masking_utils"]
    return [fx.GraphModule.recompile, CapturedTraceback.summary,
            vars(torch.autograd.Function)["apply"].__func__.__code__, torch.no_grad.__enter__, torch.no_grad.__exit__,
            masking.find_packed_sequence_indices, masking.is_torchdynamo_exporting, masking.fast_all,
            library.create_mask, library.flex_attention_hop, nn.Module._apply, nn.Module.__getattr__,
            nn.Module.__call__,
            sys.modules["transformers.integrations.moe"].ExpertsInterface.get_interface,
            sys.modules["transformers.models.switch_transformers.modeling_switch_transformers"]
            .SwitchTransformersExperts.forward]


@pytest.mark.parametrize("opened", [
    delay_code_generation, shorten_stacks, lambda: replace_apply(lambda *call: None),
    lambda: build_masks_as_run(zoo.llama()[0]), lambda: experts_as_operators(zoo.llama()[0]),
    lambda: switch_layers_as_operators(zoo.switch()[0]),
    flex_attention_as_operator, modules_stay, gradients_stay],
    ids=["code", "stacks", "functions", "masks", "experts", "switch", "flexible", "moves", "gradients"])
def test_a_patch_is_undone(opened: Callable[[], AbstractContextManager[None]]) -> None:
    zoo.llama()
    zoo.switch()
    before = patched()
    with pytest.raises(KeyError), opened():
        assert patched() != before
        raise KeyError
    assert patched() == before


def test_modules_run_untraced_while_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    own, traced = nn.Module.__call__, lambda self, x: 0
    monkeypatch.setattr(nn.Module, "__call__", traced)
    with pytest.raises(KeyError), modules_untraced():
        assert nn.Module.__call__ is own
        raise KeyError
    assert nn.Module.__call__ is traced
