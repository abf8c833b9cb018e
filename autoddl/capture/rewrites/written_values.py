"""Writes a program without writes in place, where it is plain what they change.

    y = x.add_(1)                         y = x + 1, and later readers of x read y
    x[:, i].copy_(y)                      x = select_scatter(x, y, 1, i)
    batch_norm(x, .., mean, var, True)    _native_batch_norm_legit_functional, which yields the new averages too
    a buffer that is written              its new value is an output of the program

`run_decompositions({})` does so for any program by tracing it once more, which takes as long as the export itself. It
is needed where another view of what is written is read afterwards. It also is where an input, a parameter or a constant
is written. A convolutional network with batch norms and `relu_` is plain, as is a recurrence that fills a matrix.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoddl.capture.fx_tools import call_arguments, insert, name_of, replace, written_by

__all__ = ["make_functional"]

aten = torch.ops.aten
NORM, DETACH = "batch_norm.default", aten.detach_.default
SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""Views, and the operators that yield what is viewed with another value there."""
UNSHARED = (torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded)
"""Marks of operators that write more than the values of a tensor, or draw them."""


def make_functional(program: ExportedProgram) -> bool:
    """Makes a program functional in place; False, with nothing changed, where it is not plain what writes change."""
    nodes = list(program.graph.nodes)
    buffers = dict(program.graph_signature.inputs_to_buffers)
    if not _is_plain(nodes, buffers):
        return False
    now = _rewritten(nodes)
    new = [(now[node], buffers[node.name]) for node in nodes if node in now]
    outputs, specs = nodes[-1], program.graph_signature.output_specs
    for spec, value in zip(specs, outputs.args[0], strict=True):
        spec.arg = TensorArgument(value.name) if isinstance(value, Node) else spec.arg
    outputs.args = ((*(value for value, _ in new), *outputs.args[0]),)
    specs[:0] = [OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), name) for value, name in new]
    program.graph_module.recompile()
    return True


def _writes(node: Node) -> list[Node]:
    """The tensors that an operator writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if name_of(node.target) != NORM:
        return written_by(node)
    values = call_arguments(node)
    return [values[k] for k in ("running_mean", "running_var") if values["training"] and values[k] is not None]


def _is_plain(nodes: Sequence[Node], buffers: Collection[str]) -> bool:
    """Whether every write has a twin, and no other view of what is written is read later."""
    place = {node: i for i, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    memory, twins = _Memory(), _Twins()
    for i, node in enumerate(nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, torch._ops.OpOverload) or not twins.known(node):
                return False
            if not all(_is_alone(x, i, memory, last, buffers) for x in _writes(node) if node.target != DETACH):
                return False
        memory.add(node)
    return True


def _is_alone(x: Node, i: int, memory: "_Memory", last: Mapping[Node, int], buffers: Collection[str]) -> bool:
    """Whether node i may write x: of all that shares its memory, only what x is a part of is read later."""
    views = _views(memory.first(x))
    whole = memory.first(views[-1].args[0] if views else x)  # type: ignore[arg-type]
    if whole.op != "call_function" and (whole.op != "placeholder" or whole.name not in buffers):
        return False
    if views and (views[0] is not x or last[x] > i):
        return False
    return all(one.op == "call_function" and last[one] <= i for one in memory.others(whole))


def _views(x: Node) -> list[Node]:
    """The views of SCATTERS by which x is a part of a tensor, the last first."""
    found: list[Node] = []
    while x.target in SCATTERS and not x.kwargs:
        found.append(x)
        x = x.args[0]  # type: ignore[assignment]
    return found


class _Memory:
    """Which nodes share memory, as their fake tensors and the schemas of operators say."""

    def __init__(self) -> None:
        self._first: dict[Node, Node] = {}
        self._storages: dict[Node, set[int]] = {}
        self._nodes: dict[int, list[Node]] = defaultdict(list)

    def add(self, node: Node) -> None:
        """Adds a node, after all that it reads."""
        found = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(node.meta.get("val"))
                 if isinstance(leaf, torch.Tensor)}
        if isinstance(node.target, torch._ops.OpOverload):
            pairs = zip(node.target._schema.arguments, call_arguments(node).values(), strict=True)
            shared = pytree.tree_leaves([value for one, value in pairs if one.alias_info])
            found = found.union(*(self._storages[x] for x in shared if isinstance(x, Node)))
            if node.target._schema.is_mutable:
                self._first[node] = self.first(written_by(node)[0])
        self._storages[node] = found
        for storage in found:
            self._nodes[storage].append(node)

    def first(self, node: Node) -> Node:
        """The node that made the tensor which operators in place hand on."""
        return self._first.get(node, node)

    def others(self, node: Node) -> Iterator[Node]:
        """The nodes that share memory with a node and are no names of the same tensor."""
        return (one for storage in self._storages[node] for one in self._nodes[storage]
                if self.first(one) is not self.first(node))


class _Twins:
    """Which operators in place have a twin that yields the same dtype."""

    def __init__(self) -> None:
        self._same: dict[object, bool] = {}

    def known(self, node: Node) -> bool:
        """Whether a node writes nothing, or `_twin` and `_norm` know the operator that yields what it writes."""
        if name_of(node.target) == NORM:
            values = call_arguments(node)
            averages = [values[k] for k in ("running_mean", "running_var") if values[k] is not None]
            return len(averages) == 2 or (not averages and values["training"])
        if not written_by(node):
            return not node.target._schema.is_mutable  # type: ignore[union-attr]
        twin = _twin(node)
        if twin is None:
            return False
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        key = node.target, tuple((x.dtype, x.dim() == 0) if isinstance(x, torch.Tensor) else type(x)
                                 for x in pytree.tree_leaves((args, kwargs)))
        if key not in self._same:
            self._same[key] = twin(*args, **kwargs).dtype == node.meta["val"].dtype
        return self._same[key]


def _twin(node: Node) -> Any:
    """`aten.add.Tensor` of `aten.add_.Tensor`; None where there is none, or it would do something else."""
    target: Any = node.target
    name, schema = target._schema.name.removeprefix("aten::"), target._schema
    if not name.endswith("_") or name.endswith("__") or (
            target != DETACH and any(tag in target.tags for tag in UNSHARED)):
        return None
    twin = getattr(getattr(aten, name[:-1], None), target._overloadname, None)
    if twin is None or twin._schema.is_mutable or len(twin._schema.returns) != 1 or len(schema.returns) != 1:
        return None
    return twin if [one.name for one in twin._schema.arguments] == [one.name for one in schema.arguments] else None


def _rewritten(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Replaces the operators that write, and yields the last value of every placeholder that is written."""
    place = {node: i for i, node in enumerate(nodes)}
    origin: dict[Node, Node] = {}
    now: dict[Node, Node] = {}
    for i, node in enumerate(nodes):
        written = _writes(node)
        if name_of(node.target) != NORM and not written:
            continue
        result, *new = _norm(node) if name_of(node.target) == NORM else _pure(node)
        for x, value in zip(written, new, strict=True):
            whole, value = _whole(node, x, value)
            whole.replace_all_uses_with(value, partial(_is_later, place, i))
            origin[value] = origin.get(whole, whole)
            now |= {origin[value]: value} if origin[value].op == "placeholder" else {}
        replace(node, result)
    return now


def _is_later(place: Mapping[Node, int], i: int, node: Node) -> bool:
    return place.get(node, -1) > i


def _whole(node: Node, x: Node, value: Node) -> tuple[Node, Node]:
    """What x is a part of, or x itself, and its value once x has a new one."""
    for view in _views(x):
        x = view.args[0]  # type: ignore[assignment]
        value = _call(node, SCATTERS[view.target], (x, value, *view.args[1:]), {}, x.meta["val"])  # type: ignore[index]
    return x, value


def _pure(node: Node) -> tuple[Node, Node]:
    """The twin of an operator in place: its result, and the new value of what is written."""
    new = _call(node, _twin(node), node.args, node.kwargs, node.meta["val"])
    return new, new


def _norm(node: Node) -> tuple[Node, ...]:
    """A batch norm without writes: its result, and the new averages where it trains."""
    values = call_arguments(node)
    order = ["input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"]
    if values["running_mean"] is None:
        target, order = aten._native_batch_norm_legit.no_stats, order[:3] + order[5:]
    elif values["training"]:
        target = aten._native_batch_norm_legit_functional.default
    else:
        target, order = aten._native_batch_norm_legit_no_training.default, order[:5] + order[6:]
    args = tuple(values[name] for name in order)
    found = _results(node, target, map_arg(args, lambda x: x.meta["val"]))
    norm, kept = _call(node, target, args, {}, found), (0, 3, 4) if len(found) > 3 else (0,)
    return tuple(insert(node, operator.getitem, (norm, k), found[k]) for k in kept)


def _results(node: Node, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a batch norm yields; in training all but the dtype of what it keeps for backward is known of its inputs."""
    if target is not aten._native_batch_norm_legit_functional.default:
        found: tuple[Any, ...] = target(*args)
        return found
    x, weight, bias, mean, variance, *numbers = args
    dtype = _kept_dtype(*(one if one is None else one.dtype for one in (x, weight, bias, mean, variance)), *numbers)
    kept = x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)
    return (node.meta["val"], *kept, mean, variance)


@lru_cache(maxsize=100)
def _kept_dtype(x: torch.dtype, *others: Any) -> Any:
    """The dtype of the mean that a batch norm keeps for backward, of tensors of these dtypes."""
    with FakeTensorMode():
        rest = [torch.empty(1, dtype=one) if isinstance(one, torch.dtype) else one for one in others]
        return aten._native_batch_norm_legit_functional(torch.empty(2, 1, dtype=x), *rest)[1].dtype


def _call(before: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
    """A new call in front of `before`, named as a trace names it."""
    with before.graph.inserting_before(before):
        name = target._schema.name.removeprefix("aten::")
        node = before.graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {**before.meta, "val": value}
    return node
