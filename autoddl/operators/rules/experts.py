"""The rule of a mixture of experts (`autoddl.experts`), whose shapes are those of `kernels.experts`.

    t    tokens          x S(0), chosen S(0), shares S(0), weights B -> S(0)       a rank sorts its own tokens
    e    experts         U S(0), D S(0), rest B -> P                               a rank computes its experts' share of
                                                                                   every token, which add up
    i    inner width     U S(i), D S(i) -> P                                       as for two dense products

Where the two halves of U lie one after the other, no piece of it has the same elements of both. Then U is whole beside
D S(i), and a rank reads a part of each half: its gradient is a partial sum. D's bias is added once, so that it is P
where i is split. Columns of the result, and partial sums of the shares, would be right and save no work on U.
"""

from autoddl.core.graph import Op
from autoddl.core.layout import B, P, Split, State
from autoddl.operators.rules.dimension_strings import Rule, Signature
from autoddl.operators.rules.writing import RuleOf, Tensors, get, rule_text

__all__ = ["RULES"]


def _experts(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    rows, weights = [["t", "."]] * 3, [["."] * len(t.shape) for t in inputs[3:]]
    return Rule(rule_text([*rows, *weights], rows[:1]), (_of_experts(op), _of_inner_width(op, inputs)))


def _of_experts(op: Op) -> Signature:
    return Signature((B, B, B, *(Split(0) for _ in op.slots[3:])), (P,), "e")


def _of_inner_width(op: Op, inputs: Tensors) -> Signature:
    """U is split where its pieces are those of D: if it has one half, or its halves lie in pairs."""
    transposed = bool(get(op, "transposed"))
    inner, halves = inputs[4].shape[1 if transposed else 2], get(op, "halves")
    together = halves == 1 or bool(get(op, "paired"))
    of_up: State = Split(2 if transposed else 1) if together else B
    biases: dict[str, State] = {"up_bias": Split(1) if together else B, "down_bias": P}
    return Signature((B, B, B, of_up, Split(1 if transposed else 2), *(biases[slot] for slot in op.slots[5:])), (P,),
                     "i", (inner,) if together and halves == 2 else ())


RULES: dict[str, RuleOf] = {"autoddl.experts": _experts}
