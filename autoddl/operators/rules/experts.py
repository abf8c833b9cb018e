"""The rule of a mixture of experts (`autoddl.experts`), whose shapes are those of `kernels.experts`.

    t    tokens          x S(0), chosen S(0), shares S(0), weights B -> S(0)       a rank sorts its own tokens
    e    experts         U S(0), D S(0), rest B -> P                               a rank computes its experts' share of
                                                                                   every token, which add up
    i    inner width     U S(i), D S(i) -> P                                       as for two dense products
    e    experts         everything S(0) -> S(0)                                   tokens are sent to the ranks of their
                                                                                   experts, and results back: inner

Where the two halves of U lie one after the other, no piece of it has the same elements of both. Then U is whole beside
D S(i), and a rank reads a part of each half: its gradient is a partial sum. D's bias is added once, so that it is P
where i is split. Columns of the result, and partial sums of the shares, would be right and save no work on U.

Tokens are sent over all axes that split experts, or over none. So the group of ranks among which they are sent has all
experts, and a rank sends the rows of all its tokens.

    forward     8 bytes per expert, the rows of the tokens, the rows of the result
    backward    rows of the result, a share each, rows of the tokens, a share each
"""

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, local_shape
from autoddl.operators.rules.dimension_strings import Rule, Signature
from autoddl.operators.rules.writing import RuleOf, Tensors, get, rule_text

__all__ = ["RULES", "rows_sent"]


def _experts(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    rows, weights = [["t", "."]] * 3, [["."] * len(t.shape) for t in inputs[3:]]
    return Rule(rule_text([*rows, *weights], rows[:1]), (_of_experts(op), _of_inner_width(op, inputs), _sent(op)))


def _of_experts(op: Op) -> Signature:
    return Signature((B, B, B, *(Split(0) for _ in op.slots[3:])), (P,), "e")


def _sent(op: Op) -> Signature:
    return Signature((Split(0),) * len(op.slots), (Split(0),), "e", inner=True)


def rows_sent(op: Op, graph: Graph, read: Layout, mesh: Mesh, coordinate: tuple[int, ...] | None
              ) -> tuple[tuple[str, int], ...]:
    """(pass, bytes) of what a rank sends, in order; `read` is the layout of its tokens."""
    x, chosen, shares, up, down = (graph.tensors[t] for t in op.inputs[:5])
    rows = local_shape(x.shape, read, mesh, coordinate)[0] * chosen.shape[1]
    wide, out = rows * x.shape[1] * up.itemsize, rows * graph.tensors[op.outputs[0]].shape[1] * down.itemsize
    share = rows * shares.itemsize
    return (("forward", 8 * down.shape[0]), ("forward", wide), ("forward", out),
            ("backward", out), ("backward", share), ("backward", wide), ("backward", share))


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
