"""The footprint of a mixture of experts, whose formulas are those of `kernels.experts` and `expert_sizes`.

Backward keeps the rows u of the upper product, the places of the rows, and the end of each expert's. Beside these there
exist, in the order of the kernel's lines,

    forward     the tokens' rows, all values of the gate, its result and y, y twice
    backward    q twice, z and what the gate kept; D', these and three more; U', D', u' and the tokens' rows

Where a piece of each half of U is used, the pieces lie in a copy. Whole numbers have 8 bytes.
"""

from autoddl.operators.expert_sizes import expert_sizes
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.gate_expressions import calls, kept

__all__ = ["experts_footprint"]


def experts_footprint(call: LocalOp) -> Footprint:
    """Keeps its inputs, u and the order of the rows."""
    s, size = expert_sizes(call.op, tuple(x.shape for x in call.inputs), call.inner), call.inputs[3].itemsize
    wide, upper, inner, out = (s.rows * n * size for n in (s.wide, s.upper, s.inner, s.out))
    gate = str(dict(call.op.args)["gate"])
    places, ends, biased = 8.0 * s.rows, 8.0 * s.experts, call.op.slot("down_bias") is not None
    copy = float(s.experts * s.wide * s.upper * size) * (s.upper < s.written)
    before = max(wide + copy, upper * (call.op.slot("up_bias") is not None), len(calls(gate)) * inner, inner + out,
                 2 * out + s.rows * size)
    held = inner * (1 + len(kept(gate) | {calls(gate)[-1]}))
    made = {k: float(call.inputs[k].nbytes) for k in call.needs}
    lower, both = made.get(4, 0.0), made.get(3, 0.0) + made.get(4, 0.0)
    most = max((2 + biased) * out + held, lower + held + 3 * inner, both + upper + wide + copy)
    saves = tuple(k for k, slot in enumerate(call.op.slots) if slot != "up_bias")
    return Footprint(saves, extra=upper + places + ends, before=3 * places + ends + upper + before,
                     during=2 * places + out, back=max(0.0, most + places + 3 * s.rows * size - sum(made.values())))
