"""Footprints of recurrent layers: what every step leaves for backward.

    other bytes = steps * batch * layers * hidden size * (a number of its kind), with the output, which is kept too

The numbers were counted in torch 2.13. On a processor an LSTM's steps are written out by oneDNN, and keep the most. A
layer on a GPU is taken to keep what its cell keeps, and beside it the input and output of each step.
"""

from collections.abc import Mapping
from math import prod

from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.work import base

__all__ = ["recurrent_footprint"]

CELL: Mapping[str, tuple[float, float]] = {
    "lstm": (5.0, 1.0), "gru": (6.0, 3.0), "rnn_tanh": (1.0, 1.0), "rnn_relu": (1.0, 1.0)}
"""Values of the hidden size that a cell keeps, and that it needs for a moment in forward."""

ON_CPU: Mapping[str, tuple[float, float]] = {
    "lstm": (17.375, 0.0), "gru": (6.94, 4.0), "rnn_tanh": (1.0, 2.0), "rnn_relu": (1.0, 2.0)}
"""The same of a step of a layer on a processor, its output among what it keeps. Batches that come first are turned."""


def recurrent_footprint(call: LocalOp) -> Footprint:
    """Keeps all matrices, and the gates and states of every step; an LSTM its biases as well."""
    name, x, state = base(call.op).removeprefix("aten."), *call.inputs[:2]
    saves = tuple(k for k, v in enumerate(call.inputs) if name == "lstm" or len(v.shape) > 1)
    once = float(prod(state.shape) * x.itemsize)
    if name.endswith("_cell"):
        kept, moment = CELL[name.removesuffix("_cell")]
        return Footprint(saves, extra=once * kept, during=once * moment)
    steps = prod(x.shape[:-1]) // max(1, state.shape[1])
    kept, moment = ON_CPU[name] if call.on_cpu else (CELL[name][0] + 2, 0.0)
    turned = 2.0 if moment and dict(call.op.args).get("batch_first") else 0.0
    return Footprint(saves, (0,), extra=max(0.0, once * steps * kept - call.nbytes),
                     during=once * steps * (moment + turned))
