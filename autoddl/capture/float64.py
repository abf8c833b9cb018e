"""A captured program in float64, whatever dtypes the model computes in: the same operators on the same names.

In float64 rounding is 1e-16 and cannot hide a wrong layout. Casts inside the model (a norm that computes in float32)
become casts to float64, so decisions of a plan for the one program are decisions for the other.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoddl.capture.capture import Captured
from autoddl.capture.sample import Sample
from autoddl.core.graph import Op, Value
from autoddl.operators.kernels import custom_ops

__all__ = ["cast", "seeded", "widened"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in FLOATS)


def widened(captured: Captured) -> Captured:
    """The same program, every float a float64."""
    graph = captured.graph
    tensors = tuple(replace(t, dtype="float64") if t.is_floating else t for t in graph.tensors)
    constants = {t: value.double() if value.dtype in FLOATS else value for t, value in captured.constants.items()}
    program = copy.deepcopy(captured.program)
    for node in program.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(node.args, _wider), fx.node.map_aggregate(node.kwargs, _wider)
    program.recompile()
    return replace(captured, graph=replace(graph, tensors=tensors, ops=tuple(_op(op) for op in graph.ops)),
                   program=program, constants=constants)


def _wider(value: Any) -> Any:
    return torch.float64 if value in FLOATS else value


def _op(op: Op) -> Op:
    def one(value: Value) -> Value:
        return "float64" if value in NAMES else value

    return replace(op, args=tuple((name, one(value)) for name, value in op.args))


def seeded(program: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The same program, dropping what step `seed` drops; as captured its seed is 0."""
    if seed == 0:
        return program
    program = copy.deepcopy(program)
    for node in program.graph.nodes:
        if node.target in (custom_ops.dropout, custom_ops.attention):
            node.kwargs = {**node.kwargs, "seed": seed}
    program.recompile()
    return program


def cast(batch: Sample) -> Sample:
    """The batch with its floats in float64."""
    def one(leaf: object) -> object:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return Sample(*pytree.tree_map(one, (batch.args, dict(batch.kwargs))))
