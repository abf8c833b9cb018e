"""Rewrites a captured program in float64, whatever dtypes the model computes in.

In float64 rounding is 1e-16 and cannot hide a wrong layout. Casts inside the model, such as those of a norm that
computes in float32, become casts to float64. Operators and names stay, so a plan for one program fits the other.

A program that computes in several dtypes also has a form in which each is twice as wide (`TWICE`): its casts stay.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoddl.capture.capture import Captured
from autoddl.capture.rewrites.autocast import OWN_DTYPES, base_name
from autoddl.capture.sample import Sample
from autoddl.core import graph as graphs
from autoddl.core.graph import Op, Value
from autoddl.operators.kernels import custom_ops
from autoddl.operators.kernels.arguments import bound, parameters

__all__ = ["TWICE", "WIDEST", "Dtypes", "cast", "cast_module", "seeded", "wide_default", "widened"]

_COMPLEX = {torch.complex32: torch.complex64, torch.complex64: torch.complex128}

WIDEST = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, **_COMPLEX,
          torch.complex32: torch.complex128}
"""Every dtype as float64, or as pairs of it."""

TWICE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64, **_COMPLEX}
"""Every dtype as one of twice its width: the casts between them stay."""

Dtypes = Mapping[torch.dtype, torch.dtype]


def widened(captured: Captured, wider: Dtypes = WIDEST) -> Captured:
    """The program and graph with every floating dtype replaced as `wider` says; by default with float64."""
    graph, names = captured.graph, {_name(old): _name(new) for old, new in wider.items()}
    constants = {t: value.to(wider.get(value.dtype, value.dtype)) for t, value in captured.constants.items()}
    program = copy.deepcopy(captured.program)

    def one(value: Any) -> Any:
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    for node in program.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(node.args, one), fx.node.map_aggregate(node.kwargs, one)
        if wider is TWICE and base_name(node) in OWN_DTYPES:
            node.target = _in_dtype_of_statistics(node.target)
    program.recompile()
    return replace(captured, graph=replace(graph, tensors=tuple(_tensor(t, names) for t in graph.tensors),
                                           ops=tuple(_op(op, names) for op in graph.ops)),
                   program=program, constants=constants)


@contextmanager
def wide_default() -> Iterator[None]:
    """While open, what operators make of whole numbers alone, as `image.byte() / 255`, is in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(WIDEST.get(before, before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_dtype_of_statistics(norm: Any) -> Callable[..., Any]:
    """A batch norm that computes in the dtype of its running mean: float64 beside float32, which PyTorch refuses."""
    def call(*args: Any, **kwargs: Any) -> Any:
        given = bound(norm, args, kwargs)
        out, *others = norm(**given | {"input": given["input"].to(given["running_mean"].dtype)})
        return (out.to(given["input"].dtype), *others)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in parameters(norm)])  # type: ignore[attr-defined]
    return call


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(tensor: graphs.Tensor, names: Mapping[str, str]) -> graphs.Tensor:
    """The tensor in its wider dtypes; a master or gradient of the same dtype is none of its own."""
    dtype, master, reduced = (names.get(name, name) for name in (tensor.dtype, tensor.master, tensor.reduced))
    return replace(tensor, dtype=dtype, master=master if master != dtype else "",
                   reduced=reduced if reduced != dtype else "")


def _op(op: Op, names: Mapping[str, str]) -> Op:
    def one(value: Value) -> Value:
        return names.get(value, value) if isinstance(value, str) else value

    return replace(op, args=tuple((name, one(value)) for name, value in op.args))


def seeded(program: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The program with the draws of step `seed`; as captured its seed is 0."""
    if seed == 0:
        return program
    program = copy.deepcopy(program)
    for node in program.graph.nodes:
        if node.target in (custom_ops.dropout, custom_ops.attention, custom_ops.draw):
            node.kwargs = {**node.kwargs, "seed": seed}
    program.recompile()
    return program


def cast_module(module: nn.Module) -> nn.Module:
    """The module, whose floats are now in float64, and complex numbers pairs of it."""
    made: nn.Module = module._apply(lambda one: one.to(WIDEST.get(one.dtype, one.dtype)))
    return made


def cast(batch: Sample) -> Sample:
    """The batch with its floats in float64, and complex numbers as pairs of it."""
    def one(leaf: object) -> object:
        return leaf.to(WIDEST.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    return Sample(*pytree.tree_map(one, (batch.args, dict(batch.kwargs))))
