"""Records calls of operators as capture would, made from plain calls: what rules are tried on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoddl.core.graph import Graph, Kind, Op, Value
from autoddl.core.graph import Tensor as Entry
from autoddl.operators.kernels import custom_ops
from autoddl.operators.kernels.arguments import bound, defaults, parameters

__all__ = ["Case", "Hole", "case", "fill", "listed", "recorded"]

BOUND_LATER = ("seed", "index")
"""Arguments of our own functions that only a run can know."""
UNRECORDED = ("device", "pin_memory", "non_blocking")


@dataclass(frozen=True, eq=False)
class Case:
    """A call fn(*args, **kwargs), where `Hole(k)` stands for input k; op 0 of `graph` records it."""

    graph: Graph
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: tuple[Tensor, ...]

    @property
    def op(self) -> Op:
        return self.graph.ops[0]

    @property
    def inputs(self) -> tuple[Entry, ...]:
        return tuple(self.graph.tensors[t] for t in self.op.inputs)

    @property
    def outputs(self) -> tuple[Entry, ...]:
        return tuple(self.graph.tensors[t] for t in self.op.outputs)

    def saying(self, said: tuple[tuple[str, Value], ...]) -> "Case":
        """The call with further arguments of its op, as `operators.own_facts` reads them."""
        op = replace(self.op, args=(*self.op.args, *said))
        return replace(self, graph=replace(self.graph, ops=(op,)))

    def differentiable(self, k: int) -> bool:
        """Whether input k may ask for a gradient, as class weights, signs and running statistics may not."""
        slot = self.op.slots[k]
        if slot == "target" and "soft_margin" in self.op.target:
            return False
        floating = self.values[k].is_floating_point() or self.values[k].is_complex()
        return floating and not slot.startswith("running_") and not (
            slot in ("weight", "pos_weight") and ("loss" in self.op.target or "cross_entropy" in self.op.target))

    def __str__(self) -> str:
        return f"{self.op.target}({', '.join(str(list(v.shape)) for v in self.values)}, {dict(self.op.args)})"


@dataclass(frozen=True)
class Hole:
    """Input k of a call: opaque, as an fx node is."""

    k: int


def case(target: str, *args: Any, **kwargs: Any) -> Case:
    """A call of an operator of torch, or of our own, with tensors that are all different objects."""
    return recorded(_function(target), target, args, kwargs)


def recorded(fn: Callable[..., Any], target: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Case:
    """The call fn(*args, **kwargs), recorded by the schema of the operator or the signature of the function."""
    kwargs = kwargs or {}
    given = {**defaults(fn), **bound(fn, args, kwargs)}
    values = {name: given.get(name) for name in parameters(fn)
              if not target.startswith("autoddl.") or name not in BOUND_LATER}
    inputs = [pair for name, value in values.items() for pair in _tensors(name, value)]
    tensors = tuple(tensor for _, tensor in inputs)
    entries = tuple(Entry(f"t{i}", tuple(t.shape), _text(t.dtype), Kind.INPUT)
                    for i, t in enumerate((*tensors, *listed(fn(*args, **kwargs)))))
    n = len(tensors)
    op = Op("op", target, tuple(range(n)), tuple(slot for slot, _ in inputs), tuple(range(n, len(entries))),
            tuple(pair for name, value in values.items() for pair in _plain(name, value)))
    places = {id(tensor): k for k, tensor in enumerate(tensors)}
    return Case(Graph(entries, (op,), op.outputs), fn, _punch(args, places), _punch(kwargs, places), tensors)


def _function(target: str) -> Any:
    namespace, *path = target.split(".")
    found: Any = custom_ops if namespace == "autoddl" else getattr(torch.ops, namespace)
    for part in path:
        found = getattr(found, part)
    return found


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """(slot, tensor) pairs of one argument."""
    if isinstance(value, Tensor):
        return [(name, value)]
    return [(f"{name}.{i}", v) for i, v in enumerate(value) if isinstance(v, Tensor)] if _is_list(value) else []


def _plain(name: str, value: Any) -> list[tuple[str, Any]]:
    """The pairs that `Op.args` records of one argument: of a list of tensors with gaps, where the gaps are."""
    if not _tensors(name, value):
        return [] if name in UNRECORDED else [(name, _text(value))]
    gaps = tuple(v is None for v in value) if _is_list(value) else ()
    return [(f"{name}_none", gaps)] if any(gaps) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _text(value: Any) -> Any:
    if _is_list(value):
        return tuple(_text(v) for v in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value).removeprefix("torch.")


def listed(result: Any) -> list[Tensor]:
    """The tensors that a call yields."""
    return [r for r in (result if _is_list(result) else (result,)) if isinstance(r, Tensor)]


def _punch(tree: Any, places: dict[int, int]) -> Any:
    """Tensors -> holes."""
    if isinstance(tree, Tensor):
        return Hole(places[id(tree)])
    if isinstance(tree, dict):
        return {name: _punch(value, places) for name, value in tree.items()}
    return type(tree)(_punch(v, places) for v in tree) if _is_list(tree) else tree


def fill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Holes -> tensors."""
    if isinstance(tree, Hole):
        return tensors[tree.k]
    if isinstance(tree, dict):
        return {name: fill(value, tensors) for name, value in tree.items()}
    return type(tree)(fill(v, tensors) for v in tree) if _is_list(tree) else tree
