"""Footprints of elementwise ops: what their derivatives read, and the buffers they take (torch's derivatives.yaml).

    y' f'(x)    every call of the derivative's expression makes a buffer; all but the last exist with the gradient until
                it is done: atan'  y' / (x x + 1)  has x x and its sum, erf'  four
    masks       comparisons are a byte an element: min <= x <= max takes two
    broadcast   a gradient is of the output's shape first

Columns of the table: whether the input or the output is kept, buffers of the output's size, masks.
"""

from collections.abc import Callable, Mapping
from math import prod

from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.work import base

__all__ = ["ELEMENTWISE"]

Kind = Callable[[LocalOp], Footprint]

_TABLE = """
none    0 0  _to_copy ceil floor round sign trunc fix deg2rad rad2deg
input   0 0  gelu silu leaky_relu elu celu selu softplus hardswish hardsigmoid mish hardtanh relu6 threshold softshrink
             hardshrink logit log
input   1 0  abs sin sinh cosh log10 log1p log2 lgamma digamma
input   2 0  pow square cos atan
input   3 0  acosh asinh atanh
input   4 0  asin erf erfc erfinv
input   5 0  acos
input   7 0  sinc
input   0 1  clamp_min clamp_max
input   0 2  clamp clip
input   0 3  nan_to_num
input   1 2  maximum minimum fmax fmin
output  0 0  relu tanh sigmoid special_expit exp softmax _softmax log_softmax _log_softmax
output  1 0  sqrt exp2 expm1
output  2 0  rsqrt reciprocal tan
"""


def pointwise_footprint(kept: str, buffers: int, masks: int) -> Kind:
    """Makes the footprint function of a row of the table. A clamp has a mask for each bound that it has."""
    def kind(call: LocalOp) -> Footprint:
        bounds = [dict(call.op.args).get(name, 0) for name in ("min", "max")]
        count = masks - (bounds.count(None) if base(call.op) == "aten.clamp" else 0)
        return Footprint(tuple(range(len(call.inputs))) if kept == "input" else (), (0,) if kept == "output" else (),
                         back=buffers * call.nbytes + float(count * prod(call.outputs[0])), output_shaped=True)
    return kind


def _rows() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    kind = pointwise_footprint("none", 0, 0)
    for line in _TABLE.strip().splitlines():
        names = line.split()
        if not line.startswith(" "):
            kind, names = pointwise_footprint(names[0], int(names[1]), int(names[2])), names[3:]
        found.update({f"aten.{name}": kind for name in names})
    return found


def _add(call: LocalOp) -> Footprint:
    """The gradient is passed on; that of a subtrahend is negated."""
    kept = {"aten.add": ("self", "other"), "aten.sub": ("self",), "aten.rsub": ("other",)}.get(base(call.op), ())
    return Footprint(passes=tuple(k for k, slot in enumerate(call.op.slots) if slot in kept), output_shaped=True)


def _mul(call: LocalOp) -> Footprint:
    """Each factor is kept for the other's gradient; a number for none."""
    saves = tuple(k for k in range(len(call.inputs)) if any(n != k for n in call.needs))
    return Footprint(saves, output_shaped=True)


def _div(call: LocalOp) -> Footprint:
    """a / b: b for a; both for b, whose gradient, made first, takes three buffers more: -g ((a / b) / b)."""
    if len(call.inputs) == 1:
        return Footprint(output_shaped=True)
    below = 1 in call.needs
    return Footprint((0, 1) if below else (1,), back=(3 - (0 in call.needs)) * call.nbytes * below, output_shaped=True)


def _addcmul(call: LocalOp) -> Footprint:
    """a + c x y hands the gradient on to a; x and y are kept for each other, whose gradients are scaled first."""
    saves = tuple(k for k in (1, 2) if any(n not in (0, k) for n in call.needs))
    return Footprint(saves, back=call.nbytes * bool(saves), passes=(0,), output_shaped=True)


def _power(call: LocalOp) -> Footprint:
    """Where the exponent is a tensor the result is kept too, for its gradient."""
    if call.op.slots == ("self",):
        return pointwise_footprint("input", 2, 0)(call)
    above = len(call.inputs) - 1
    buffers = 1 if not above else 4 if 0 in call.needs else 3
    return Footprint(tuple(range(len(call.inputs))), (0,),
                     back=buffers * call.nbytes + above * float(prod(call.outputs[0])), output_shaped=True)


def _prelu(call: LocalOp) -> Footprint:
    """The gradients of input and slope are made at once, both of the input's shape."""
    return Footprint((0, 1), back=call.nbytes * (2 - len(call.needs)), output_shaped=True)


def _log_sigmoid(call: LocalOp) -> Footprint:
    """On a CPU exp(-|x|) is kept too."""
    return Footprint((0,), extra=call.nbytes * call.on_cpu, output_shaped=True)


def _lerp(call: LocalOp) -> Footprint:
    """Nothing is kept for a weight that is a number. A weight tensor is kept, and both ends for its gradient."""
    saves = (0, 1, 2) if 2 in call.needs else (2,)
    if len(call.inputs) == 2:
        return Footprint(output_shaped=True)
    return Footprint(saves, back=call.nbytes, output_shaped=True)


def _where(call: LocalOp) -> Footprint:
    mask = call.op.slot("condition")
    mask = call.op.slot("mask") if mask is None else mask
    return Footprint(() if mask is None else (mask,), output_shaped=True)


def _of_two(buffers: int, masks: int = 0) -> Kind:
    """Both inputs are kept, and either gradient takes `buffers`."""
    return pointwise_footprint("input", buffers, masks)


ELEMENTWISE: Mapping[str, Kind] = {
    **_rows(), "aten.add": _add, "aten.sub": _add, "aten.rsub": _add, "aten.neg": _add, "aten.mul": _mul,
    "aten.div": _div, "aten.addcmul": _addcmul, "aten.pow": _power, "aten.prelu": _prelu,
    "aten.log_sigmoid": _log_sigmoid, "aten.lerp": _lerp, "aten.where": _where, "aten.masked_fill": _where,
    "aten.logaddexp": _of_two(3), "aten.xlogy": _of_two(1, 3)}
