"""Parses the dimension strings of operator rules and lists the signatures they stand for.

A rule says how the dims of an operator's tensors correspond:

    "b k, n k, n -> b n | 0*1 + 2"            y = x W^T + bias
    "b s (h d:64) -> b s h d"                 a reshape: h is the outer factor of a merged dim
    "b . -> b ."                              softmax: the last dim may not be split

* Commas separate tensors, blanks separate dims, and `/` is a tensor without dims. A dim is written in one of four ways:

    b                  a letter or word
    .                  a dim that may not be split
    (outer inner ..)   a merged dim
    name:size          a name whose size does not follow from the shapes

* For one mesh axis, a name may be split everywhere at once: S where a tensor has it, B where not. In a merged dim only
  the outermost name can be split, and only evenly; names of size 1 before it do not count. A name in brackets `[n]` may
  only be split evenly. A name that no output has is summed over: the outputs are P.

* The form after `|` says in which inputs the outputs are linear, as a sum of products of input positions. One factor of
  every product may be P, the rest B, and the outputs are P. Inputs in no product are never P.

* A name that is summed over must be in one product. The first factor of every other product is then P: `fill` leaves a
  bias on one rank.

* The form `sum` says that the outputs are sums over the names they lack, and linear in no input (a squared error).

* B everywhere is always a signature.

`signatures(text, shapes)` gives those of one mesh axis; on a mesh each axis chooses for itself.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from autoddl.core.errors import InputError
from autoddl.core.layout import B, P, Split, State

__all__ = ["Dim", "Rule", "Signature", "Spec", "parse", "signatures"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor: `names` of its factors, outermost first, with `sizes` where written; `even` if bracketed.

    The name `.` is a factor that may not be split."""

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    even: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed dimension string: dims of the inputs and outputs, and the linear form as products of input positions.

    `sums` says that the form is `sum`."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    products: tuple[tuple[int, ...], ...]
    sums: bool = False

    @property
    def tensors(self) -> tuple[tuple[Dim, ...], ...]:
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True, slots=True)
class Signature:
    """The states of an op's inputs and outputs on one mesh axis.

        split     the name that is split, '' if none
        divides   the sizes that the axis must divide evenly
        inner     whether the local kernel itself communicates over the axis
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    split: str = ""
    divides: tuple[int, ...] = ()
    inner: bool = False

    def __str__(self) -> str:
        mark = " (inner)" if self.inner else ""
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}{mark}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A dimension string, and the signatures that no string can express."""

    text: str
    extra: tuple[Signature, ...] = ()


_DIM = re.compile(r"\(([^)]*)\)|\[([^\]]*)\]|(\S+)")


def _factor(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\.|[A-Za-z_]\w*)(?::(\d+))?", text)
    if match is None:
        raise InputError(f"{text!r} is no dim name; write a word, '.', or name:size")
    return match[1], int(match[2]) if match[2] else None


def _tensor(text: str) -> tuple[Dim, ...]:
    if text.strip() == "/":
        return ()
    dims = []
    for merged, even, single in _DIM.findall(text):
        factors = [_factor(part) for part in (merged or even or single).split()]
        dims.append(Dim(tuple(n for n, _ in factors), tuple(s for _, s in factors), bool(even)))
    return tuple(dims)


def _products(text: str, inputs: int) -> tuple[tuple[int, ...], ...]:
    if text.strip() in ("", "sum"):
        return ()
    if not re.fullmatch(r"\s*\d+\s*([+*]\s*\d+\s*)*", text):
        raise InputError(f"form {text.strip()!r} is no sum of products of input positions; write them as in '0*1 + 2'")
    products = tuple(tuple(int(factor) for factor in term.split("*")) for term in text.split("+"))
    if any(factor >= inputs for term in products for factor in term):
        raise InputError(f"form {text.strip()!r} names an input that the rule does not have; it has {inputs}")
    return products


@lru_cache(maxsize=10_000)
def parse(text: str) -> Spec:
    """Read a dimension string; a malformed one raises InputError with the string."""
    body, _, form = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise InputError(f"rule {text!r} has no '->'; write 'inputs -> outputs | form'")
    inputs = tuple(_tensor(part) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(_tensor(part) for part in right.split(","))
    return Spec(inputs, outputs, _products(form, len(inputs)), form.strip() == "sum")


def _sizes(spec: Spec, shapes: Shapes) -> dict[str, int]:
    """Size of every name: written, or from a dim of its own, or what the known factors of a merged dim leave."""
    known: dict[str, int] = {}
    pairs = [(dim, size) for dims, shape in zip(spec.tensors, shapes, strict=True)
             for dim, size in zip(dims, shape, strict=True)]
    for _ in range(2):
        for dim, size in pairs:
            written = [s if s is not None else known.get(n) for n, s in zip(dim.names, dim.sizes, strict=True)]
            unknown = [i for i, s in enumerate(written) if s is None]
            if len(unknown) == 1:
                written[unknown[0]] = size // max(1, prod(s for s in written if s is not None))
            known.update({n: s for n, s in zip(dim.names, written, strict=True) if n != "." and s is not None})
    for dim, size in pairs:
        factors = [known.get(n, s) for n, s in zip(dim.names, dim.sizes, strict=True)]
        if None not in factors and prod(f for f in factors if f is not None) != size:
            raise InputError(f"dim ({' '.join(dim.names)}) has factors {factors}, which do not make its size {size}")
    return known


def _slim(spec: Spec, sizes: dict[str, int]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The names of every dim, those of size 1 left out where others stand."""
    def names(dim: Dim) -> tuple[str, ...]:
        return tuple(n for n in dim.names if sizes.get(n) != 1) or dim.names[:1]
    return tuple(tuple(names(dim) for dim in dims) for dims in spec.tensors)


def _summed(spec: Spec, has: set[int]) -> tuple[int, ...] | None:
    """Inputs that are P when a name that only inputs `has` is summed over; None if no product allows it."""
    if spec.sums:
        return ()
    term = next((t for t in spec.products if has <= set(t)), None)
    if term is None:
        return None
    partial = tuple(t[0] for t in spec.products if t is not term)
    return None if any(i in term for i in partial) else partial


def _of_name(spec: Spec, name: str, sizes: dict[str, int]) -> Signature | None:
    """S(name) where a tensor has it; None where it stands inside a merged dim or is summed over without a product."""
    slim, n = _slim(spec, sizes), len(spec.inputs)
    if any(name in names[1:] for dims in slim for names in dims) or any(
            sum(name in names for names in dims) > 1 for dims in slim):
        return None
    places = [next((d for d, names in enumerate(dims) if names[0] == name), None) for dims in slim]
    states: list[State] = [B if d is None else Split(d) for d in places]
    even = any(d is not None and (len(slim[t][d]) > 1 or spec.tensors[t][d].even) for t, d in enumerate(places))
    if all(d is None for d in places[n:]):
        partial = _summed(spec, {i for i in range(n) if places[i] is not None})
        if partial is None:
            return None
        states = [P if i in partial or i >= n else part for i, part in enumerate(states)]
    elif any(d is None for d in places[n:]):
        return None
    return Signature(tuple(states[:n]), tuple(states[n:]), name, (sizes[name],) if even else ())


def _linear(spec: Spec) -> list[Signature]:
    """One factor of every product P: outputs P."""
    found = []
    for chosen in product(*spec.products):
        inputs = tuple(P if i in chosen else B for i in range(len(spec.inputs)))
        if all(sum(i in chosen for i in term) == 1 for term in spec.products):
            found.append(Signature(inputs, (P,) * len(spec.outputs)))
    return list(dict.fromkeys(found))


@lru_cache(maxsize=100_000)
def signatures(text: str, shapes: Shapes) -> tuple[Signature, ...]:
    """Returns all signatures for one mesh axis of rule `text` on tensors of `shapes` (inputs, then outputs).

    Raises InputError where the string does not fit the shapes."""
    spec = parse(text)
    if len(shapes) != len(spec.tensors) or any(len(d) != len(s) for d, s in zip(spec.tensors, shapes, strict=False)):
        raise InputError(f"rule {text!r} does not fit tensors of shapes {shapes}")
    sizes = _sizes(spec, shapes)
    splits = [_of_name(spec, name, sizes) for name, size in sizes.items() if size > 1]
    whole = Signature((B,) * len(spec.inputs), (B,) * len(spec.outputs))
    linear = _linear(spec) if spec.products else []
    return (*(s for s in splits if s is not None), *linear, whole)
