"""Traces a module with torch.export into a functional program of whole operators, without allocating memory.

Every parameter and buffer is replaced by a fake CPU tensor in a copy of the module, with ties kept. So models on any
device are captured alike, `meta` included, and the user's module is not touched. `torch.export` without strictness
records what forward does. Regions under `no_grad` are inlined with their inputs detached, regions under autocast with
its casts. A program that writes in place is made functional by `written_values`, where it is plain what writes change.
Elsewhere `run_decompositions({})` does that, which doubles the time.
"""

import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from autoddl.capture.export_guards import guard_export
from autoddl.capture.patches.torch_autocast_patch import enter_autocast_anywhere
from autoddl.capture.patches.torch_checkpoint_patch import note_checkpoints
from autoddl.capture.patches.torch_distributions_patch import von_mises_of_tries
from autoddl.capture.patches.torch_flex_attention_patch import flex_attention_as_operator
from autoddl.capture.patches.torch_module_moves_patch import modules_stay
from autoddl.capture.patches.transformers_experts_patch import experts_as_operators
from autoddl.capture.patches.transformers_masks_patch import build_masks_as_run
from autoddl.capture.patches.transformers_switch_patch import switch_layers_as_operators
from autoddl.capture.rewrites.autocast_casts import cast_regions
from autoddl.capture.rewrites.constant_values import KnownValues
from autoddl.capture.rewrites.export_passes import (
    check_averages,
    has_composite_views,
    inline_regions,
    link_users,
    needs_decomposition,
    shifted_numbers,
    whole_dropout,
)
from autoddl.capture.rewrites.own_backward import HiddenEffect, OwnCall, call_functions
from autoddl.capture.rewrites.written_values import make_functional
from autoddl.capture.sample import Sample, named
from autoddl.capture.source_lines import failing_line
from autoddl.capture.wrappers import check_constants, check_wrappers, wrapper_notes
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.graph import Graph

__all__ = ["check_held", "trace"]

DYNAMIC = re.compile(r"data.?dependent|SymInt|unbacked|\bu\d+\b|\.item\(\)|DynamicOutput|_local_scalar_dense", re.I)
CACHE = re.compile(r"(\w*Cache)\b")
OPERATOR = re.compile(r"(?:torch\.ops\.)?(aten[.:]+\w+(?:\.\w+)?)")


def trace(model: nn.Module, sample: Sample, dtype: torch.dtype | None = None, mixed: bool = False
          ) -> tuple[ExportedProgram, dict[str, str], tuple[str, ...]]:
    """(the functional program, the name of every tensor of the sample by its placeholder, lines on what it leaves out).

    Names are those of `named`, lines those of `wrappers`.

    With a `dtype`, the module and the sample are traced as after `.to(dtype)`: their floating tensors have it. A
    program that will be `mixed` is traced in float32, but the module is told that autocast is enabled. Raises
    CaptureError for a model that cannot be captured, with the line of its code.
    """
    _check_shaped(model)
    check_wrappers(model)
    named(model.forward, sample)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    stand_in = _fake_module(model, mode, dtype)
    args, kwargs = pytree.tree_map(lambda leaf: _fake(leaf, mode, dtype) if isinstance(leaf, Tensor) else leaf,
                                   (sample.args, dict(sample.kwargs)))
    with note_checkpoints() as checkpointed:
        known = KnownValues(len(list(model.named_parameters(remove_duplicate=False))),
                            list(model.named_buffers(remove_duplicate=False)))
        program, calls = _export(stand_in, args, kwargs, mixed, known)
    check_constants(model, program.constants)
    names = _names(program, stand_in, Sample(args, kwargs))
    link_users(program.graph_module)
    check_averages(program.graph_module)
    whole_dropout(program.graph_module)
    shifted_numbers(program.graph_module)
    inline_regions(program.graph_module)
    cast_regions(program.graph_module)
    if needs_decomposition(program.graph_module):
        if has_composite_views(program.graph_module) or not make_functional(program):
            program = _decomposed(type(model).__name__, program)
        _check_unwritten(type(model).__name__, known.read, program)
    call_functions(program.graph_module, calls)
    return program, names, wrapper_notes(model, stand_in, checkpointed)


def _decomposed(model: str, program: ExportedProgram) -> ExportedProgram:
    """The functional program, traced again."""
    try:
        with _quiet():
            found: ExportedProgram = program.run_decompositions({})
            return found
    except Exception as error:
        raise _explain(model, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings, logs and prints of torch while it traces; anything that matters raises an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check_shaped(model: nn.Module) -> None:
    """Raises CaptureError where a lazy module waits for its first batch."""
    waiting = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        raise CaptureError(f"{type(model).__name__} has no shape yet for {waiting[0]}{more}: a lazy module learns it "
                           "from its first batch; call the model once before planning, or write the sizes, as "
                           "nn.Linear(16, 32) for nn.LazyLinear(32)")


def check_held(graph: Graph, constants: Mapping[int, Tensor]) -> None:
    """Raises InputError where a constant has no value: such a model can be planned, but not run."""
    empty = [graph.tensors[t].fqn for t, value in constants.items() if isinstance(value, FakeTensor) or value.is_meta]
    if empty:
        raise InputError(f"the model holds a tensor on the meta device that is no buffer, {empty[0]}, and nothing says "
                         "its values: register_buffer it, or build the model on the CPU")


def _fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    with mode:
        own = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=own, device="cpu")


def _fake_module(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the module whose parameters, buffers and unregistered meta tensors are fakes."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_fake(parameter, mode, dtype), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode, dtype)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _fake(value, mode) if value.is_meta else value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot be copied (copy.deepcopy: {error}); keep locks, streams and "
                           "the like out of its attributes") from error


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: bool,
            known: KnownValues) -> tuple[ExportedProgram, list[OwnCall]]:
    """The exported program, and the calls of autograd Functions in it."""
    try:
        with (_quiet(), build_masks_as_run(model), experts_as_operators(model), switch_layers_as_operators(model),
              modules_stay(), flex_attention_as_operator(), von_mises_of_tries(), enter_autocast_anywhere(mixed),
              guard_export(known) as calls):
            return torch.export.export(model, args, kwargs, strict=False), calls
    except Exception as error:
        raise _explain(type(model).__name__, error) from error


def _explain(model: str, error: Exception) -> CaptureError:
    """The error that says what cannot be captured: the operator if it is known, and the line of the model."""
    text = str(error)
    line = failing_line(error.__traceback__) or "an unknown line"
    if isinstance(error, HiddenEffect):
        return CaptureError(f"{model} cannot be captured: at {line} {text}")
    if (cache := CACHE.search(text)) and "output" in text:
        return CaptureError(f"{model} returns its cache of keys and values ({cache[1]}), which no training step reads: "
                            "give use_cache=False with the sample, or set model.config.use_cache = False")
    found = OPERATOR.search(text)
    operator = f" by {found[1]}" if found else ""
    if DYNAMIC.search(text) or DYNAMIC.search(type(error).__name__):
        way = "its sizes come from values: make it an operator of torch.library with register_fake" \
            if "ctc_loss" in operator else "use torch.where or masks, or turn off what draws or skips, like layerdrop=0"
        return CaptureError(f"forward of {model} decides by the values of a tensor{operator} at {line}; a plan needs "
                            f"one graph for all inputs: {way}")
    reason = text.splitlines()[0] if text else "no message"
    return CaptureError(f"{model} cannot be captured: {type(error).__name__}{operator} at {line}: {reason}")


def _check_unwritten(model: str, read: Set[str], program: ExportedProgram) -> None:
    """Raises CaptureError where forward writes a buffer whose values decided what the program is."""
    written = sorted(read & set(program.graph_signature.buffers_to_mutate.values()))
    if written:
        raise CaptureError(f"forward of {model} decides by the values of its buffer {written[0]}, and writes it; a "
                           "plan needs one graph for all steps: call the model once before planning if that sets it "
                           "for good, do in the training loop what is done every so many steps, or use torch.where")


def _names(program: ExportedProgram, model: nn.Module, sample: Sample) -> dict[str, str]:
    """By placeholder, the name of the sample's tensor: example and placeholders are flattened in one order."""
    by_id = {id(leaf): name for name, leaf in named(model.forward, sample).items() if isinstance(leaf, Tensor)}
    leaves = pytree.tree_leaves(program.example_inputs, is_leaf=lambda leaf: leaf is None)
    return {str(placeholder): by_id[id(leaf)]
            for placeholder, leaf in zip(_placeholders(program), leaves, strict=True) if isinstance(leaf, Tensor)}


def _placeholders(program: ExportedProgram) -> list[str]:
    nodes = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    return nodes[len(nodes) - len(program.graph_signature.user_inputs):]
