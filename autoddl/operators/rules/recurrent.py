"""Rules of recurrent layers and their cells: sequences of a batch are independent, steps and features are not.

    lstm, steps first    "t b i, l b h, l b h, weights -> t b h, l b h, l b h" with b alone to be split
    lstm_cell            "b i, b h, b h, weights -> b h, b h" likewise
"""

from autoddl.core.graph import Op
from autoddl.operators.rules.writing import RuleOf, Tensors, get, rule_text

__all__ = ["RULES"]


def _layer(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """The sequence is input and output 0; other states have the batch in dim 1; the parameters are whole."""
    first = bool(get(op, "batch_first", False))
    sequence = ["b", ".", "."] if first else [".", "b", "."]
    state = [".", "b", "."]
    given = [sequence if slot == "input" else state if slot.startswith("hx") else ["."] * len(t.shape)
             for slot, t in zip(op.slots, inputs, strict=True)]
    return rule_text(given, [sequence, *([state] * (len(outputs) - 1))])


def _cell(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    given = [["b", "."] if slot == "input" or slot.startswith("hx") else ["."] * len(t.shape)
             for slot, t in zip(op.slots, inputs, strict=True)]
    return rule_text(given, [["b", "."]] * len(outputs))


RULES: dict[str, RuleOf] = {
    **{f"aten.{name}.input": _layer for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}_cell.default": _cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
