"""The captured model as a table: tensors, and operators in the order in which they run. Free of torch.

A `Tensor` is an input, a parameter, a buffer, a constant or the result of one op. Its number is its position in
`Graph.tensors`. An `Op` reads tensors through named *slots* and writes one or more tensors. A slot is an argument name
of the torch operator, like `weight`; the members of a list argument are `tensors.0`, `tensors.1`. All other arguments
of the call, defaults included, are plain frozen values in `args`.

The *cone* are the tensors that depend on no parameter: position ids, masks, rotary tables, labels. It carries no
gradient, and every rank computes all of it, so a consumer takes its piece by slicing.

A graph has a text, which a plan keeps so that it can be explained without the model:

    {"words": [...], "values": [...], "tensors": [[...], ...], "ops": [[...], ...], "outputs": [...], "updates": [...]}

Each string stands once in `words`, each set of slots or arguments once in `values`, and rows hold their positions. So
the rows of repeated blocks differ in numbers only. JSON's lists are read back as tuples: a graph holds no lists.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

from autoddl.core.errors import InputError

__all__ = ["ASSUMED_LOAD", "OFFERED_RING", "RECEIVE", "SEEN_SHARES", "TRIED", "UNTRIED", "Graph", "Kind", "Op",
           "Tensor", "Value", "graph_from_text", "graph_to_text"]

Value = None | bool | int | float | str | tuple["Value", ...]

RECEIVE = "autoddl.receive"
"""Brings a tensor from another stage of a pipeline (`stages`): it depends on parameters, but the op reads nothing."""

ASSUMED_LOAD = "autoddl.load"
"""An argument that a call does not have: the rows of the busiest rank over the mean, of a layer of experts. It is what
is assumed of the data, and no part of the model."""

OFFERED_RING = "autoddl.ring"
"""Another one, of attention: whether the search tries rings for it, however short its sequences are."""

TRIED, UNTRIED = "autoddl.tried", "autoddl.untried"
"""Others: a dimension string that was found by trying the operator, and why none was."""

SEEN_SHARES = "autoddl.seen"
"""Another, of FlexAttention (`operators.flexible`): the share of keys that are seen, counted on the sample."""

PLANNED = frozenset((ASSUMED_LOAD, OFFERED_RING, SEEN_SHARES, TRIED, UNTRIED))
"""Arguments that say what planning assumes or has found out, and are no part of the model."""

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
            "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16}

_STOPS = frozenset(f"aten.{name}.default" for name in (
    "detach", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
"""Operators through which no gradient flows back to the tensor that they read."""


class Kind(StrEnum):
    """The origin of a tensor."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the program, with its global shape.

        name       the graph's own name, unique
        shape      sizes of the dims
        dtype      name of the torch dtype, like `float32`
        kind       where it comes from
        fqn        name of a parameter or buffer in the user's module, or of the input; "" for results
        aliases    other names of a tied parameter, which is one Tensor
        trained    whether it is a parameter that receives a gradient
        master     of a parameter that is stored and updated in another dtype than it is used in: that dtype
        reduced    of a parameter whose gradient is summed over ranks and microbatches in another dtype: that dtype
        infinite   whether a buffer, a constant or an input has infinite values; no part of the fingerprint
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    fqn: str = ""
    aliases: tuple[str, ...] = ()
    trained: bool = False
    master: str = ""
    reduced: str = ""
    infinite: bool = False

    @property
    def stored(self) -> "Tensor":
        """The parameter as it is stored and updated, with the dtype of its master copy."""
        return replace(self, dtype=self.master) if self.master else self

    @property
    def gradient(self) -> "Tensor":
        """The gradient of the parameter as it is summed, in its dtype on the wire."""
        return replace(self, dtype=self.reduced) if self.reduced else self

    @property
    def itemsize(self) -> int:
        """Bytes of an element; InputError where the dtype is unknown."""
        if self.dtype not in ITEMSIZE:
            raise InputError(f"tensor {self.name} has dtype {self.dtype}; known are {', '.join(ITEMSIZE)}")
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether the dtype is one of floating-point numbers, complex ones too: gradients flow through these alone."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

        name       the graph's own name, unique
        target     the torch operator (`aten.linear.default`) or one of ours (`autoddl.dropout`)
        inputs     numbers of the tensors that it reads
        slots      the argument name of each input
        outputs    numbers of the tensors that it writes
        args       (argument name, plain value) pairs, defaults included
        module     name of the user's submodule that made the call
        source     line of the user's code, `file:line`
    """

    name: str
    target: str
    inputs: tuple[int, ...]
    slots: tuple[str, ...]
    outputs: tuple[int, ...]
    args: tuple[tuple[str, Value], ...] = ()
    module: str = ""
    source: str = ""

    def arg(self, name: str) -> Value:
        """The plain argument `name`; an argument that the operator does not have raises."""
        for key, value in self.args:
            if key == name:
                return value
        raise InputError(f"{self.target} ({self.name}) has no argument {name!r}; it has {[k for k, _ in self.args]}")

    def slot(self, name: str) -> int | None:
        """Position in `inputs` of the tensor in slot `name`; None if no tensor was passed there."""
        return self.slots.index(name) if name in self.slots else None


@dataclass(frozen=True)
class Graph:
    """A program. `outputs` are the tensors that it returns, the loss first; `updates` are (buffer, new value) pairs."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Graph"], tuple[object, ...]]:
        return Graph, (self.tensors, self.ops, self.outputs, self.updates)

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.ops, self.outputs, self.updates))

    def producers(self) -> Mapping[int, int]:
        """Tensor -> position of the op that writes it."""
        return self._producers

    @cached_property
    def _producers(self) -> Mapping[int, int]:
        return {t: i for i, op in enumerate(self.ops) for t in op.outputs}

    def consumers(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """Tensor -> the (position of the op, position of the slot) pairs that read it, in order."""
        return self._consumers

    @cached_property
    def _consumers(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        uses: dict[int, list[tuple[int, int]]] = {t: [] for t in range(len(self.tensors))}
        for i, op in enumerate(self.ops):
            for k, t in enumerate(op.inputs):
                uses[t].append((i, k))
        return {t: tuple(pairs) for t, pairs in uses.items()}

    def dependent(self) -> frozenset[int]:
        """The tensors that depend on a parameter; all others are the cone."""
        return self._dependent

    @cached_property
    def _dependent(self) -> frozenset[int]:
        found = {t for t, tensor in enumerate(self.tensors) if tensor.kind is Kind.PARAMETER}
        for op in self.ops:
            if op.target == RECEIVE or any(t in found for t in op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    def differentiable(self) -> frozenset[int]:
        """The tensors through which a gradient flows.

        They are floating, reached from a trained parameter through floating tensors, and read on the way to the loss.
        The other outputs of an op with such an output are among them. A tensor that another stage sends says itself
        whether a gradient goes back.
        """
        return self._differentiable

    @cached_property
    def _differentiable(self) -> frozenset[int]:
        found = {t for t, tensor in enumerate(self.tensors) if tensor.trained}
        for op in self.ops:
            received = op.target == RECEIVE and bool(op.arg("gradient"))
            if received or (any(t in found for t in op.inputs) and op.target not in _STOPS):
                found.update(t for t in op.outputs if self.tensors[t].is_floating)
        back = found.intersection(self.outputs[:1])
        for op in reversed(self.ops):
            if not back.isdisjoint(op.outputs):
                back.update(found.intersection((*op.inputs, *op.outputs)))
        return frozenset(back)

    @property
    def mixed(self) -> bool:
        """Whether a parameter is used in another dtype than it is stored in."""
        return any(t.master for t in self.tensors)

    def fingerprint(self) -> str:
        """A short hash of structure, shapes, dtypes and parameter names: equal for equal models, whatever is assumed or
        found out of them."""
        rows = [[t.name, t.shape, t.dtype, t.kind, t.fqn, t.aliases, t.trained, *([t.master, t.reduced] * _is_mixed(t))]
                for t in self.tensors]
        rows += [[op.target, op.inputs, op.slots, op.outputs, [one for one in op.args if one[0] not in PLANNED]]
                 for op in self.ops]
        text = json.dumps([rows, self.outputs, self.updates], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_mixed(tensor: Tensor) -> bool:
    """Whether the tensor has more than one dtype, which its rows of text then say."""
    return bool(tensor.master or tensor.reduced)


class _Pool:
    """Distinct values in the order in which they were first met. A call returns the position of its value."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, value: object) -> int:
        return self.index.setdefault(json.dumps(value, separators=(",", ":"), ensure_ascii=False), len(self.index))

    @property
    def listed(self) -> list[Any]:
        return [json.loads(text) for text in self.index]


def graph_to_text(graph: Graph) -> str:
    """The text of `graph`, one line of JSON."""
    word, value = _Pool(), _Pool()
    tensors = [[word(t.name), t.shape, word(t.dtype), word(t.kind), word(t.fqn), [word(a) for a in t.aliases],
                int(t.trained), *([word(t.master), word(t.reduced)] * (_is_mixed(t) or t.infinite)),
                *([1] * t.infinite)] for t in graph.tensors]
    ops = [[word(op.name), word(op.target), op.inputs, value(op.slots), op.outputs, value(op.args), word(op.module),
            word(op.source)] for op in graph.ops]
    tree = {"words": word.listed, "values": value.listed, "tensors": tensors, "ops": ops, "outputs": graph.outputs,
            "updates": graph.updates}
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def graph_from_text(text: str) -> Graph:
    """The graph that `graph_to_text` wrote. Raises InputError for any other text."""
    try:
        tree = json.loads(text)
        words, values = tree["words"], [_frozen(value) for value in tree["values"]]
        tensors = tuple(Tensor(words[name], tuple(shape), words[dtype], Kind(words[kind]), words[fqn],
                               tuple(words[a] for a in aliases), bool(trained), *(words[w] for w in others[:2]),
                               *map(bool, others[2:]))
                        for name, shape, dtype, kind, fqn, aliases, trained, *others in tree["tensors"])
        ops = tuple(Op(words[name], words[target], tuple(inputs), values[slots], tuple(outputs), values[args],
                       words[module], words[source])
                    for name, target, inputs, slots, outputs, args, module, source in tree["ops"])
        return Graph(tensors, ops, tuple(tree["outputs"]), tuple((old, new) for old, new in tree["updates"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"the plan's graph cannot be read ({error!r}): make the plan again") from None


def _frozen(value: Any) -> Any:
    """`value` with its lists turned into tuples, at every depth."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
