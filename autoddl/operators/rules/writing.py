"""How dimension strings are written: names for dims, tensors side by side, the linear form.

    rule_text([["a", "."], ["a"]], [["a", "."]], " | 0")  ->  "a ., a -> a . | 0"
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from autoddl.core.graph import Op, Tensor, Value
from autoddl.operators.rules.dimension_strings import Rule

__all__ = ["RuleOf", "Tensors", "aligned", "dims_of", "fixed", "form", "get", "ints", "names", "rule_text", "wrap"]

Tensors = tuple[Tensor, ...]
RuleOf = Callable[[Op, Tensors, Tensors], str | Rule]


def names(count: int, prefix: str = "a") -> list[str]:
    """`count` dim names that differ from those of another prefix."""
    return [f"{prefix}{i}" for i in range(count)]


def rule_text(inputs: Iterable[Sequence[str]], outputs: Iterable[Sequence[str]], tail: str = "") -> str:
    """The dimension string of tensors given as lists of dims."""
    left, right = (", ".join(" ".join(dims) or "/" for dims in side) for side in (inputs, outputs))
    return f"{left} -> {right}{tail}"


def form(inputs: Tensors, outputs: Tensors, products: Iterable[tuple[int, ...]]) -> str:
    """Returns the linear form of a sum of products of input positions, or ''.

    Only floating tensors can be partial sums, so others leave their product. There is no form where a product has no
    factor left, or where an output is not floating."""
    kept = [tuple(i for i in term if inputs[i].is_floating) for term in products]
    if not kept or not all(kept) or not all(t.is_floating for t in outputs):
        return ""
    return " | " + " + ".join("*".join(map(str, term)) for term in kept)


def fixed(inputs: Tensors, outputs: Tensors, tail: str = "") -> str:
    """No dim may be split."""
    return rule_text((["."] * len(t.shape) for t in inputs), (["."] * len(t.shape) for t in outputs), tail)


def aligned(shape: tuple[int, ...], out: tuple[int, ...], letters: Sequence[str]) -> list[str]:
    """Names of a tensor that broadcasts to `out`: dims line up from the right, a repeated dim is not split."""
    shift = len(out) - len(shape)
    return [letters[k + shift] if n == out[k + shift] else "." for k, n in enumerate(shape)]


def get(op: Op, name: str, default: Value = None) -> Value:
    """The plain argument `name` if the operator has it."""
    return dict(op.args).get(name, default)


def ints(value: Value) -> tuple[int, ...]:
    """An int or a list of ints as a tuple; None is empty; a list in text form is read."""
    if isinstance(value, int):
        return (int(value),)
    if isinstance(value, str):
        return tuple(int(n) for n in re.findall(r"-?\d+", value))
    return tuple(v for v in value or () if isinstance(v, int)) if isinstance(value, tuple) else ()


def wrap(dims: Iterable[int], rank: int) -> tuple[int, ...]:
    """Negative dims counted from the end."""
    return tuple(d % max(rank, 1) for d in dims)


def dims_of(op: Op, rank: int, key: str = "dim", empty: Collection[int] = ()) -> tuple[int, ...]:
    """The dims that argument `key` names; `empty` if it names none."""
    return wrap(ints(get(op, key)), rank) or tuple(empty)
