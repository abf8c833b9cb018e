"""The footprint of a mixture of experts, whose formulas are those of `kernels.experts` and `expert_sizes`.

Backward keeps the rows u of the upper product, the places of the rows, and the end of each expert's. Beside these there
exist, in the order of the kernel's lines,

    forward     the tokens' rows, all values of the gate, its result and y, y twice
    backward    q twice, z and what the gate kept; D', these and three more; U', D', u' and the tokens' rows

Where a piece of each half of U is used, the pieces lie in a copy. Where tokens are sent, the rows that come are kept
too, with their experts and the order in which they came. What is sent, what comes, and this in sorted order exist
together. Whole numbers have 8 bytes.
"""

from dataclasses import dataclass

from autoddl.operators.expert_sizes import expert_sizes
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.gate_expressions import calls, kept

__all__ = ["experts_footprint"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Counts the bytes of all rows here, and two other sizes."""

    wide: float
    """Of the tokens."""
    upper: float
    """Of u."""
    inner: float
    """Of the inner width."""
    out: float
    """Of the result."""
    places: float
    """Of a whole number each."""
    ends: float
    """Bytes of a whole number per expert."""
    copy: float
    """Bytes of the pieces of U in use, where they are copied."""


def experts_footprint(call: LocalOp) -> Footprint:
    """Keeps its inputs, u and the order of the rows."""
    s, size = expert_sizes(call.op, tuple(x.shape for x in call.inputs), call.inner), call.inputs[3].itemsize
    wide, upper, inner, out = (s.rows * n * size for n in (s.wide, s.upper, s.inner, s.out))
    rows = _Rows(wide, upper, inner, out, 8.0 * s.rows, 8.0 * s.experts,
                 float(s.experts * s.wide * s.upper * size) * (s.upper < s.written))
    extra = rows.upper + rows.places + rows.ends + call.inner * (rows.wide + 2 * rows.places)
    made = {k: float(call.inputs[k].nbytes) for k in call.needs}
    back = _backward(call, rows, made.get(3, 0.0), made.get(4, 0.0)) + rows.places + 3 * s.rows * size
    saves = tuple(k for k, slot in enumerate(call.op.slots) if slot != "up_bias")
    return Footprint(saves, extra=extra, before=extra + 2 * rows.places + _forward(call, rows) + s.rows * size,
                     during=2 * rows.places + rows.out, back=max(0.0, back - sum(made.values())))


def _forward(call: LocalOp, rows: _Rows) -> float:
    """Bytes beside what is kept: the largest moment of forward."""
    biased = rows.upper * (call.op.slot("up_bias") is not None)
    sorted_rows = rows.wide * (1 + call.inner) + rows.copy
    return max(sorted_rows, biased, len(calls(_gate(call))) * rows.inner, rows.inner + rows.out,
               (2 + call.inner) * rows.out)


def _backward(call: LocalOp, rows: _Rows, of_up: float, of_down: float) -> float:
    """Bytes beside what is kept and the output's gradient: the largest moment of backward."""
    gate, biased = _gate(call), call.op.slot("down_bias") is not None
    held = rows.inner * (1 + len(kept(gate) | {calls(gate)[-1]}))
    last = of_up + of_down + max(rows.upper + rows.wide + rows.copy, 3 * rows.wide * call.inner)
    return max((2 + biased) * rows.out + held, 3 * rows.out * call.inner, of_down + held + 3 * rows.inner, last)


def _gate(call: LocalOp) -> str:
    return str(dict(call.op.args)["gate"])
