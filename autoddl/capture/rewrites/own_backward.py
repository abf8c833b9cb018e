"""Keeps a call of torch.autograd.Function whole: one operator of the graph, with the forward and backward it has.

    trace       forward and backward run once on tensors without values. They show the shapes of the outputs, which of
                them have a gradient, which inputs get one, and which tensors are kept for backward
    program     autoddl::function(tensors, number of the call, shapes), which torch.export keeps as it is
    afterwards  OwnBackward(Function)(*arguments), as a rank runs it

An output without a gradient (`ctx.mark_non_differentiable`) is detached, and so is an input whose gradient is None. So
the graph says where gradients flow. What a graph does not show is refused: a Function that draws, writes into its
inputs, or reads tensors that are no arguments of it.
"""

import enum
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from autoddl.capture.fx_tools import insert, operators, replace
from autoddl.capture.rewrites.autocast_region import Region, region_of
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError
from autoddl.core.graph import Value

__all__ = ["HiddenEffect", "OwnBackward", "OwnCall", "arguments_of", "call_functions", "has_setup", "trace_call"]

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, enum.Enum)
"""What an argument that is no tensor may be, alone or in tuples and lists."""


class HiddenEffect(Exception):
    """Names an effect of forward that the exported graph would not show, and the way out."""


@dataclass(frozen=True)
class OwnBackward:
    """A Function as what a program calls: F.apply(*arguments), with None for results that are no tensors."""

    function: type[torch.autograd.Function]
    saves: tuple[Value, ...] = ()
    """What it keeps for backward, as `operators.own_facts` writes it; () of one that is not known yet."""

    @property
    def target(self) -> str:
        """The name of the operator in a graph."""
        return f"function.{self.function.__name__}"

    @property
    def __name__(self) -> str:
        return f"function_{self.function.__name__}"

    @cached_property
    def __signature__(self) -> inspect.Signature:
        """The arguments of `apply`: those of forward without ctx."""
        signature = inspect.signature(self.function.forward)
        names = list(signature.parameters.values())
        return signature.replace(parameters=names if has_setup(self.function) else names[1:])

    def __call__(self, *args: Any) -> Any:
        found = self.function.apply(*args)
        return tuple(x if isinstance(x, Tensor) else None for x in found) if isinstance(found, tuple) else found


@dataclass(frozen=True)
class OwnCall:
    """A call that a trace met.

        function    what it calls
        args        its arguments, None for tensors
        tensors     places of the tensors among the arguments
        results     places of the tensors among the results; () of one tensor alone
    """

    function: OwnBackward
    args: tuple[Any, ...]
    tensors: tuple[int, ...]
    results: tuple[int, ...]


def has_setup(function: type) -> bool:
    """Whether forward takes no ctx, as that of a Function with a `setup_context`."""
    return getattr(function, "setup_context", None) is not torch.autograd.Function.setup_context


def arguments_of(function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
                 ) -> tuple[Any, ...]:
    """Returns the arguments of a call by their places; those that are given by name come with defaults between."""
    if not kwargs:
        return args
    bound = OwnBackward(function).__signature__.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def trace_call(function: type[torch.autograd.Function], apply: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any], calls: list[OwnCall]) -> Any:
    """Writes the call into the program that is traced, adds it to `calls`, and returns its results.

    Raises HiddenEffect for a Function that a graph cannot show.
    """
    name, args = function.__name__, arguments_of(function, args, kwargs)
    _check(function, args)
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        results, flows, reached, saves = _rehearsed(name, apply, args)
    several = isinstance(results, tuple)
    listed = results if several else (results,)
    places = tuple(k for k, result in enumerate(listed) if isinstance(result, Tensor))
    tensors = tuple(k for k, arg in enumerate(args) if isinstance(arg, Tensor))
    said = [[str(listed[k].dtype).removeprefix("torch."), listed[k].shape, listed[k].stride()] for k in places]
    given = [args[k].detach() if args[k].requires_grad and k not in reached else args[k] for k in tensors]
    made = torch.ops.autoddl.function(given, len(calls), json.dumps(said))
    plain = tuple(None if k in tensors else arg for k, arg in enumerate(args))
    calls.append(OwnCall(OwnBackward(function, saves), plain, tensors, places if several else ()))
    found = dict(zip(places, (x if k in flows or not x.is_floating_point() else x.detach()
                              for k, x in zip(places, made, strict=True)), strict=True))
    return tuple(found.get(k, result) for k, result in enumerate(listed)) if several else found[0]


def _check(function: type, args: Sequence[Any]) -> None:
    """Raises HiddenEffect for a Function whose arguments do not say all that it reads."""
    name = function.__name__
    if issubclass(function, CheckpointFunction):
        raise HiddenEffect(f"{name} has a backward of its own, which runs a part of the model: write checkpoints with "
                           "use_reentrant=False")
    for arg in args:
        if not isinstance(arg, Tensor) and not _is_plain(arg):
            raise HiddenEffect(f"{name}, which has a backward of its own, takes a {type(arg).__name__}: a graph shows "
                               "tensors, numbers and words; give it those, each as an argument of its own")
    for method in (vars(function).get("forward"), vars(function).get("backward")):
        cells = getattr(getattr(method, "__func__", method), "__closure__", None) or ()
        if any(isinstance(cell.cell_contents, Tensor | nn.Module) for cell in cells):
            raise HiddenEffect(f"{name}, which has a backward of its own, reads a tensor from around its class: give "
                               "the tensor as an argument")


def _is_plain(arg: Any) -> bool:
    if isinstance(arg, tuple | list):
        return all(map(_is_plain, arg))
    return isinstance(arg, PLAIN) or (isinstance(arg, FunctionType) and not arg.__closure__) \
        or (isinstance(arg, type) and not issubclass(arg, nn.Module))


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _rehearsed(name: str, apply: Callable[..., Any], args: tuple[Any, ...]
               ) -> tuple[Any, set[int], set[int], tuple[Value, ...]]:
    """Runs forward and backward on tensors without values.

    Returns (results, places of the results with a gradient, places of the arguments that get one, what it keeps).
    Raises HiddenEffect where that fails, or shows what a graph does not.
    """
    leaves = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]
    before = [x._version for x in leaves if isinstance(x, Tensor)]
    kept: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with _Draws() as draws:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            results = _tried(name, "forward", lambda: apply(*leaves))
        listed = results if isinstance(results, tuple) else (results,)
        flows = {k for k, x in enumerate(listed) if isinstance(x, Tensor) and x.requires_grad}
        wanted = {k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        roots = [listed[k] for k in sorted(flows)]
        found = _tried(name, "backward", lambda: torch.autograd.grad(
            roots, [leaves[k] for k in sorted(wanted)], [torch.empty_like(x) for x in roots], allow_unused=True)
        ) if roots else [None] * len(wanted)
    if draws.drawn:
        raise HiddenEffect(f"{name}, which has a backward of its own, draws random numbers, which would depend on the "
                           "layout: draw outside, as with dropout, and give it what was drawn")
    if before != [x._version for x in leaves if isinstance(x, Tensor)]:
        raise HiddenEffect(f"{name}, which has a backward of its own, writes into its arguments, which a graph does "
                           "not show: let it work on a copy, x.clone()")
    if not any(isinstance(x, Tensor) for x in listed):
        raise HiddenEffect(f"{name}, which has a backward of its own, returns no tensor: a graph shows tensors")
    noted = [x for y in roots[:1] for x in vars(y.grad_fn).values() if isinstance(x, Tensor)]
    saves = _saves([x for x in leaves if isinstance(x, Tensor)], [x for x in listed if isinstance(x, Tensor)],
                   [*kept, *noted])
    return results, flows, {k for k, gradient in zip(sorted(wanted), found, strict=True) if gradient is not None}, saves


def _saves(inputs: Sequence[Tensor], outputs: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[Value, ...]:
    """(positions of inputs, positions of outputs, other bytes, elements of the first output): what is kept."""
    found = {x.untyped_storage()._cdata: x for x in kept}
    mine, made = ({x.untyped_storage()._cdata: k for k, x in enumerate(tensors)} for tensors in (inputs, outputs))
    others = [x for storage, x in found.items() if storage not in mine and storage not in made]
    return (tuple(sorted(k for storage, k in mine.items() if storage in found)),
            tuple(sorted(k for storage, k in made.items() if storage in found and storage not in mine)),
            float(sum(x.untyped_storage().nbytes() for x in others)), outputs[0].numel())


def _tried(name: str, part: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise HiddenEffect(f"{name} has a backward of its own, and its {part} fails on tensors without values "
                           f"({reason}): write its kernels as operators of torch.library with register_fake") from error


torch.library.define("autoddl::function", "(Tensor[] tensors, int call, str results) -> Tensor[]")


@torch.library.register_fake("autoddl::function")  # type: ignore[untyped-decorator]
def _empty_results(tensors: list[Tensor], call: int, results: str) -> list[Tensor]:
    """The results of a call, without values: the text says their dtypes, shapes and strides."""
    return [tensors[0].new_empty_strided(shape, stride, dtype=getattr(torch, dtype))
            for dtype, shape, stride in json.loads(results)]


def call_functions(module: GraphModule, calls: Sequence[OwnCall]) -> None:
    """Replaces every autoddl::function by a call of its `OwnBackward`, in place."""
    for node in operators(module):
        if node.target is not torch.ops.autoddl.function.default:
            continue
        given, number, _ = node.args
        call = calls[int(str(number))]
        if region_of(node) is Region.ON:
            raise CaptureError(f"{call.function.function.__name__} at {line_of(node.meta.get('stack_trace'))} has a "
                               "backward of its own in a region of autocast, whose casts in it a graph does not show: "
                               "disable autocast around it, and cast what it is given")
        args = list(call.args)
        for place, tensor in zip(call.tensors, given, strict=True):  # type: ignore[arg-type]
            args[place] = tensor
        _call_function(node, call, tuple(args))
    module.recompile()


def _call_function(node: Node, call: OwnCall, args: tuple[Any, ...]) -> None:
    values = node.meta["val"]
    if call.results:
        several: list[Any] = [None] * (call.results[-1] + 1)
        for place, value in zip(call.results, values, strict=True):
            several[place] = value
    new = insert(node, call.function, args, tuple(several) if call.results else values[0])
    for item in list(node.users):
        if call.results:
            item.args = (new, call.results[int(str(item.args[1]))])
        else:
            replace(item, new)
    node.graph.erase_node(node)
