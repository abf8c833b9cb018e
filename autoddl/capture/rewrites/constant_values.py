"""Computes values that a graph has to know, where they follow from buffers and constants alone.

`edges[:, edges[0] != edges[1]]` has as many columns as values say, and `int(index.max()) + 1` is a size. A graph has
fixed sizes. A value that is made of no parameter, no input and no draw is the same in every step. It is computed when
the module is captured, and is a constant of the program.

    trace       a function of ASKS is called: the nodes behind its tensors run on the values of buffers and constants
    afterwards  the buffers that were read must not be written by forward, or their values would differ in a later step
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autoddl.capture.fx_tools import written_by

__all__ = ["KnownValues", "behind", "is_drawn"]

ASKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "nonzero", "argwhere",
        "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "bincount",
        "equal", "allclose"}
"""Functions whose results, or their shapes, follow from values. Indexing by a mask and where(mask) are two more."""
MAKES = {"zeros", "ones", "full", "empty", "arange"}
"""Those of SIZED that read no tensor but for such numbers."""
SIZED = {"pad", "view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full", "new_empty", "narrow",
         "split", "roll"} | MAKES
"""Functions that take numbers which may be tensors, as a width of padding that a buffer holds."""
MASKS = (torch.bool, torch.uint8)


class KnownValues:
    """The values of buffers, by their places among the placeholders of a trace, and the names of those that were read.
    """

    def __init__(self, parameters: int, buffers: Sequence[tuple[str, Tensor]]) -> None:
        self._first, self._buffers = parameters, tuple(buffers)
        self.read: set[str] = set()

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a function of ASKS returns where values that decide its shape are known; else NotImplemented."""
        name = getattr(func, "__name__", "")
        if name in SIZED and get_proxy_mode() is not None:
            return self._sized(func, args, kwargs)
        if not _asks(func, args) or get_proxy_mode() is None:
            return NotImplemented
        if name in ("__getitem__", "__setitem__") and _bounds(args[1]):
            return self._cut(func, args)
        found = self._result(func, args, kwargs)
        if found is not NotImplemented:
            return found
        if name == "__getitem__":
            return self._masked(args[0], _parts(args[1]))
        if name == "masked_select":
            return self._selected(*args, **kwargs)
        return self._repeated(*args, **kwargs) if name == "repeat_interleave" else NotImplemented

    def _selected(self, input: Tensor, mask: Tensor, **others: Any) -> Any:
        """Selects what a known mask says."""
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return NotImplemented if others else self._masked(input.expand(shape), (mask.expand(shape),))

    def _repeated(self, input: Tensor | None = None, repeats: Any = None, dim: int | None = None, **_: Any) -> Any:
        """Repeats what lies along a dim as often as known numbers say; along none, all elements in a row."""
        if input is None or not isinstance(repeats, Tensor):
            return NotImplemented
        x, along = (input.flatten(), 0) if dim is None else (input, dim)
        index = self._result(torch.repeat_interleave, (repeats.expand(x.shape[along]),), {})
        return index if index is NotImplemented else x.index_select(along, index)

    def _masked(self, x: Tensor, index: tuple[Any, ...]) -> Any:
        """Indexes by the places where known masks are true."""
        new: list[Any] = []
        for one in index:
            places = self._result(torch.nonzero, (one,), {"as_tuple": True}) if _is_mask(one) else (one,)
            if places is NotImplemented:
                return places
            new += places
        return x[tuple(new)]

    def _cut(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Calls x[start:stop] and x[start:stop] = y with the numbers that start and stop hold."""
        numbers = {id(one): self._result(Tensor.item, (one,), {}) for one in _bounds(args[1])}
        if NotImplemented in numbers.values():
            return NotImplemented
        index = [slice(*(numbers.get(id(part), part) for part in (one.start, one.stop, one.step)))
                 if isinstance(one, slice) else one for one in _parts(args[1])]
        return func(args[0], tuple(index), *args[2:])

    def _sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of SIZED with the numbers that whole tensors of one element hold."""
        makes = getattr(func, "__name__", "") in MAKES  # a number may come first
        first = args[:1] if args and isinstance(args[0], Tensor) and not makes else ()
        leaves, spec = pytree.tree_flatten((args[len(first):], kwargs))
        numbers = {i: self._result(Tensor.item, (leaf,), {}) for i, leaf in enumerate(leaves) if _is_number(leaf)}
        if not numbers or any(number is NotImplemented for number in numbers.values()):
            return NotImplemented
        given, named = pytree.tree_unflatten([numbers.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return func(*first, *given, **named)

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function on the values of its tensors; NotImplemented where one is not known."""
        mode: Any = get_proxy_mode()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i in places:
            leaves[i] = leaves[i] if isinstance(leaves[i], FakeTensor) else leaves[i].clone()
        slots = [get_proxy_slot(leaves[i], mode.tracer, None) for i in places]
        nodes = [slot.node if isinstance(slot, Proxy) else slot.proxy.node for slot in slots if slot is not None]
        if not places or len(nodes) < len(places):
            return NotImplemented
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            known = self._values(mode.tracer.graph, mode.tracer.root, nodes)
            if known is None:
                return NotImplemented
            for i, value in zip(places, known, strict=True):
                leaves[i] = value
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            found = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, found)  # traced, so that writing into it is

    def _values(self, graph: Graph, root: Any, nodes: Sequence[Node]) -> list[Tensor] | None:
        """The values of nodes, or None where one follows from a parameter, an input or a draw."""
        writes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
                  and node.target._schema.is_mutable]
        needed = behind(nodes, writes)
        written = {node.target for one in writes for node in _shared(written_by(one)) if node.op == "get_attr"}
        places = {node: i for i, node in enumerate(one for one in graph.nodes if one.op == "placeholder")}
        found: dict[Node, Any] = {}
        for node in [one for one in graph.nodes if one in needed]:
            value: Any = NotImplemented
            if node.op == "placeholder":
                value = self._buffer(places[node], node)
            elif node.op == "get_attr":
                value = None if node.target in written else _attribute(root, node)
            if value is None or (node.op == "call_function" and is_drawn(node)):
                return None
            found[node] = node.target(*map_arg(node.args, found.__getitem__),
                                      **map_arg(node.kwargs, found.__getitem__)) if value is NotImplemented else value
        self.read |= {self._buffers[places[node] - self._first][0] for node in needed if node.op == "placeholder"}
        return [found[node] for node in nodes]

    def _buffer(self, place: int, node: Node) -> Tensor | None:
        """A copy of the buffer at a place among the placeholders, if it is one and has values."""
        if not self._first <= place < self._first + len(self._buffers):
            return None
        value, seen = self._buffers[place - self._first][1], node.meta["val"]
        if value.shape != seen.shape or value.is_meta or isinstance(value, FakeTensor):
            return None
        return value.detach().to("cpu", seen.dtype, copy=True)


def _asks(func: Any, args: tuple[Any, ...]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) == 1
    if name in ("__getitem__", "__setitem__") and _bounds(args[1]):
        return True
    if name == "__getitem__":
        return any(_is_mask(one) for one in _parts(args[1]))
    return name in ASKS


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.dim() and not leaf.is_floating_point() and not leaf.is_complex()


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _bounds(index: Any) -> list[Tensor]:
    """Tensors among the bounds of slices."""
    return [part for one in _parts(index) if isinstance(one, slice) for part in (one.start, one.stop, one.step)
            if isinstance(part, Tensor)]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in MASKS


def _attribute(root: Any, node: Node) -> Tensor | None:
    value = operator.attrgetter(str(node.target))(root)
    known = isinstance(value, Tensor) and not value.requires_grad and not value.is_meta \
        and not isinstance(value, FakeTensor)
    return value.clone() if known else None


def is_drawn(node: Node) -> bool:
    """Whether an operator draws, or is none whose result is known to be the same every time."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    return torch.Tag.nondeterministic_seeded in node.target.tags


def behind(nodes: Iterable[Node], writes: Sequence[Node]) -> set[Node]:
    """All that nodes are made of, with what was written into it in place."""
    needed: set[Node] = set()
    _add(needed, nodes)
    while new := [node for node in writes if node not in needed and needed & _shared(written_by(node))]:
        _add(needed, new)
    return needed


def _add(needed: set[Node], nodes: Iterable[Node]) -> None:
    front = list(nodes)
    while front:
        node = front.pop()
        if node not in needed:
            needed.add(node)
            front += node.all_input_nodes


def _shared(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and those whose memory they view."""
    found: set[Node] = set()
    front = list(nodes)
    while front:
        node = front.pop()
        if node in found:
            continue
        found.add(node)
        aliases = not isinstance(node.target, torch._ops.OpOverload) or any(
            one.alias_info is not None for one in node.target._schema.returns)
        front += node.all_input_nodes if aliases else []
    return found
