"""Footprint of an einsum: torch multiplies its factors two by two, from the left or along a path (Linear.cpp).

    a pair       each factor as a batch of matrices: a look at it, or a copy; the product is made so, and looked at
    forward      products of pairs that are factors again, and copies, are kept where the other's gradient asks
    backward     from the last pair: the gradient as matrices (a copy where it does not lie so), then the factors'
"""

from dataclasses import dataclass, replace
from math import prod

from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Value, contiguous, viewed
from autoddl.operators.work import letters

__all__ = ["einsum_footprint"]


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor of a pair: input `k`, or the product of an earlier pair (None); `flows`: it receives a gradient."""

    names: tuple[str, ...]
    value: Value
    k: int | None
    flows: bool


@dataclass(frozen=True, slots=True)
class _Pair:
    """A product of two factors.

        copies   bytes of the copy of each factor as a batch of matrices, 0 where its strides need none
        again    bytes of such a copy of the product's gradient
        size     bytes of the product
    """

    factors: tuple[_Factor, _Factor]
    copies: tuple[float, float]
    again: float
    size: float

    def kept(self, side: int) -> bool:
        """Whether the gradient of the other factor reads this one."""
        return self.factors[1 - side].flows


def einsum_footprint(call: LocalOp) -> Footprint:
    """Returns the footprint of `aten.einsum`: the pairs in torch's order, then what they keep and need at once."""
    dims, out = letters(str(call.op.arg("equation")), [len(x.shape) for x in call.inputs])
    factors = [_Factor(tuple(names), x, k, k in call.needs)
               for k, (names, x) in enumerate(zip(dims, call.inputs, strict=True))]
    if len(factors) == 1:
        return Footprint(passes=(0,))
    pairs, order = list[_Pair](), [*out, *sorted({name for names in dims for name in names}.difference(out))]
    for a, b in _order(call, len(factors)):
        first, second = factors[a], factors[b]
        rest = [x for k, x in enumerate(factors) if k not in (a, b)]
        later = {*out, *(name for x in rest for name in x.names)}
        pair, product = _multiplied(first, second, order, later)
        pairs.append(pair)
        factors = [product, *rest] if call.op.arg("path") is None else [*rest, product]
    return _held(call, pairs)


def _order(call: LocalOp, count: int) -> list[tuple[int, int]]:
    path = dict(call.op.args).get("path")
    if not isinstance(path, tuple):
        return [(0, 1)] * (count - 1)
    flat = [int(str(k)) for k in path]
    return [(min(pair), max(pair)) for pair in zip(flat[::2], flat[1::2], strict=True)]


def _multiplied(a: _Factor, b: _Factor, order: list[str], later: set[str]) -> tuple[_Pair, _Factor]:
    """Returns the pair and its product. Dims stand in `order` everywhere; names in `later` are not summed."""
    names = [n for n in order if n in later and n in (*a.names, *b.names)]
    sizes = {n: s for x in (b, a) for n, s in zip(x.names, x.value.shape, strict=True)}
    batch = [n for n in names if n in a.names and n in b.names]
    left, right = [n for n in names if n not in b.names], [n for n in names if n not in a.names]
    summed = [n for n in order if n not in later and n in a.names and n in b.names]
    shape, inner = tuple(sizes[n] for n in names), (*batch, *left, *right)
    strides = dict(zip(inner, contiguous(tuple(sizes[n] for n in inner)), strict=True))
    value = Value(-1, shape, tuple(strides[n] for n in names), a.value.itemsize)
    product = _Factor(tuple(names), value, None, a.flows or b.flows)
    written = replace(product, value=value._replace(strides=contiguous(shape)))
    copies = [_copied(x, groups) if summed else 0.0 for x, groups in (
        (a, (batch, left, summed)), (b, (batch, summed, right)), (written, (batch, left, right)))]
    return _Pair((a, b), (copies[0], copies[1]), copies[2], float(value.nbytes)), product


def _copied(x: _Factor, groups: tuple[list[str], ...]) -> float:
    """Bytes of the copy that makes a factor a batch of matrices, 0 if it is one."""
    order = [x.names.index(n) for group in groups for n in group]
    if len(order) < len(x.names):
        return 0.0  # what only this factor has is summed first
    sizes = tuple(prod(x.value.shape[x.names.index(n)] for n in group) for group in groups)
    found = viewed(tuple(x.value.shape[d] for d in order), tuple(x.value.strides[d] for d in order), sizes)
    return float(x.value.nbytes) * (found is None)


def _held(call: LocalOp, pairs: list[_Pair]) -> Footprint:
    """Adds up what the pairs keep, and the most bytes that exist at once."""
    saves, copies, extra, kept, most, now = list[int](), list[tuple[int, float]](), 0.0, list[float](), 0.0, 0.0
    for pair in pairs:
        most, before = max(most, now + sum(pair.copies) + pair.size), extra + sum(size for _, size in copies)
        for side, factor in enumerate(pair.factors):
            if pair.kept(side) and factor.k is None:
                extra += pair.copies[side] or factor.value.nbytes
            elif pair.kept(side) and factor.k is not None:
                if pair.copies[side]:
                    copies.append((factor.k, pair.copies[side]))
                else:
                    saves.append(factor.k)
        kept.append(extra + sum(size for _, size in copies) - before)
        now = sum(kept) + pair.size
    back, late = _backward(pairs, kept)
    grads, beside = sum(float(call.inputs[k].nbytes) for k in call.needs), sum(kept) + pairs[-1].size
    return Footprint(tuple(sorted(set(saves))), extra=extra, copies=tuple(copies), during=max(0.0, most - beside),
                     back=max(0.0, back - beside - grads), late=max(0.0, late - grads))


def _backward(pairs: list[_Pair], kept: list[float]) -> tuple[float, float]:
    """Returns the most bytes while the output's gradient exists, and after it. A pair frees its `kept` at its end."""
    have, given, early, late, total = 0.0, pairs[-1].size, 0.0, 0.0, sum(kept)
    for i, pair in reversed(list(enumerate(pairs))):
        made = {side: float(x.value.nbytes) for side, x in enumerate(pair.factors) if x.flows}
        copied, done = total + have + given + pair.again, total + have + (pair.again or given) + sum(made.values())
        if i == len(pairs) - 1:
            early = copied if pair.again else max(copied, done)
            late = done if pair.again else 0.0
        else:
            late = max(late, copied, done)
        have += sum(size for side, size in made.items() if pair.factors[side].k is not None)
        given = sum(size for side, size in made.items() if pair.factors[side].k is None)
        total -= kept[i]
    return early, late
