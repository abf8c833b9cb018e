"""Writes the functions that FlexAttention is given as text, which `operators.flexible` reads.

Such a function takes single elements: a score (or none), and the numbers of batch, head, query and key. It is traced
once on tensors of no dims. What it computes must be elementwise; of other tensors it reads single elements.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode

from autoddl.capture.rewrites.own_backward import HiddenEffect
from autoddl.operators.flexible import INDICES, elementwise_text

__all__ = ["ElementTexts"]

LONGEST = 20_000
"""Letters of a text at most."""
SAME = frozenset(("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"))
CASTS = frozenset(("_to_copy", "to", "type_as"))
NUMBERS = frozenset(("full", "new_full", "new_ones", "new_zeros", "ones_like", "scalar_tensor", "zeros_like"))

NEUTRAL = {"bitwise_and": "True", "logical_and": "True", "bitwise_or": "False", "logical_or": "False"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of which some dims are read already: `at` has an index for these, None for the others."""

    name: str
    at: tuple[str | None, ...]


class _Elements(TorchFunctionMode):
    """Reads x[b, q] as an index: of numbers without dims torch would ask for their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, at = args
        places = list(at) if isinstance(at, tuple) else [at]
        if not all(type(one) is int or isinstance(one, Tensor) for one in places):
            return func(x, at)
        for dim in reversed(range(len(places))):
            if type(places[dim]) is int:
                x = x.select(dim, places.pop(dim))
        return torch.ops.aten.index.Tensor(x, places) if places else x


@dataclass(slots=True)
class ElementTexts:
    """Writes the functions of one call; `read` are the tensors that they read, in order."""

    read: list[Tensor] = field(default_factory=list)

    def text(self, function: Callable[..., Any], what: str, dtype: torch.dtype | None = None) -> str:
        """The text of a mask, or of a score function of scores in `dtype`; `what` names it.

        Raises HiddenEffect for a function that computes with more than single elements."""
        names = (*("s",) * (dtype is not None), *INDICES)
        try:
            with torch.no_grad(), disable_proxy_modes_tracing(), _Elements():
                given = [torch.zeros((), dtype=dtype if name == "s" else torch.int64) for name in names]
                traced = make_fx(lambda *elements: function(*elements))(*given)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise HiddenEffect(f"the {what} of flex_attention cannot be followed ({reason}): write it with elementwise "
                               "operators, and x[b, q] for an element of a tensor") from error
        return self._written(traced, names, what)

    def _written(self, traced: fx.GraphModule, names: tuple[str, ...], what: str) -> str:
        known: dict[fx.Node, Any] = {}
        left = iter(names)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(left)
            elif node.op == "get_attr":
                known[node] = self._tensor(getattr(traced, str(node.target)))
            elif node.op == "call_function":
                known[node] = _call(node, known, what)
            else:
                found = _text(node.args[0], known)
                if found is None or len(found) > LONGEST:
                    raise HiddenEffect(f"the {what} of flex_attention gives no single element, or one of more than "
                                       f"{LONGEST} letters: compute what it can outside, and read that with x[b, q]")
                return found
        raise AssertionError("a trace has an output")

    def _tensor(self, tensor: Tensor) -> str | _Part:
        number = next((i for i, one in enumerate(self.read) if one is tensor), len(self.read))
        if number == len(self.read):
            self.read.append(tensor)
        return _done(_Part(f"x{number}", (None,) * tensor.dim()))


def _done(part: _Part) -> str | _Part:
    """The text of an element, once every dim has an index."""
    if None in part.at:
        return part
    return f"{part.name}[{', '.join(str(at) for at in part.at) or '()'}]"


def _call(node: fx.Node, known: dict[fx.Node, Any], what: str) -> str | _Part:
    """The text of one call, or the rest of a tensor that it reads."""
    if node.target is operator.getitem:
        raise _refused(node, what)
    name, value = str(node.target).removeprefix("aten.").partition(".")[0], node.meta.get("val")
    source = known.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if isinstance(source, _Part):
        return _read(node, name, source, known, what)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise _refused(node, what)
    if name in SAME or (name in ("view", "reshape", "expand", "squeeze", "unsqueeze") and not value.dim()):
        return str(source)
    if name in NUMBERS:
        return _number(node, name)
    if name in CASTS:
        kind = "as_float" if value.dtype.is_floating_point else "as_bool" if value.dtype is torch.bool else "as_int"
        return f"{kind}({source})"
    parts = [_text(x, known) for x in node.args]
    named = {k: _text(x, known) for k, x in node.kwargs.items()}
    if not elementwise_text(name) or None in parts or None in named.values():
        raise _refused(node, what)
    if name in ("add", "sub") and parts[1:] == ["0"]:  # offsets of a sequence that begins at 0
        return str(parts[0])
    if value.dtype is torch.bool and (neutral := NEUTRAL.get(name)) and neutral in parts:  # and_masks begins with it
        return str(parts[1 - parts.index(neutral)])
    return f"{name}({', '.join([*map(str, parts), *(f'{k}={x}' for k, x in named.items())])})"


def _read(node: fx.Node, name: str, source: _Part, known: dict[fx.Node, Any], what: str) -> str | _Part:
    """An element of a tensor, or what is left of it: index and select, with whole numbers for some of its dims."""
    at, free = list(source.at), [dim for dim, one in enumerate(source.at) if one is None]
    if name in SAME:
        return source
    if name == "select":
        dim, number = int(str(node.args[1])), _text(node.args[2], known)
        at[free[dim]] = number
    elif name == "index":
        for dim, one in zip(free, node.args[1], strict=False):  # type: ignore[arg-type]
            at[dim] = None if one is None else _text(one, known)
            if one is not None and at[dim] is None:
                raise _refused(node, what)
    else:
        raise _refused(node, what)
    return _done(_Part(source.name, tuple(at)))


def _number(node: fx.Node, name: str) -> str:
    ends = {"new_ones": 1, "ones_like": 1, "new_zeros": 0, "zeros_like": 0}
    value = ends[name] if name in ends else node.args[0 if name == "scalar_tensor" else -1]
    dtype = node.meta["val"].dtype
    return repr(bool(value) if dtype is torch.bool else float(value) if dtype.is_floating_point else int(value))  # type: ignore[arg-type]


def _refused(node: fx.Node, what: str) -> HiddenEffect:
    return HiddenEffect(f"the {what} of flex_attention computes {node.target} of more than single elements, which a "
                        "plan cannot split: compute it outside, and read its elements, as x[b, q]")


def _text(value: Any, known: dict[fx.Node, Any]) -> str | None:
    """The text of an argument; None for what is no element."""
    if isinstance(value, fx.Node):
        found = known[value]
        return found if isinstance(found, str) else None
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None
