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

CELL: Mapping[str, float] = {"lstm": 5.0, "gru": 6.0, "rnn_tanh": 1.0, "rnn_relu": 1.0}
"""Values of the hidden size that a cell keeps."""

ON_CPU: Mapping[str, float] = {"lstm": 17.375, "gru": 6.94, "rnn_tanh": 1.0, "rnn_relu": 1.0}
"""The same of a step of a layer on a processor."""


def recurrent_footprint(call: LocalOp) -> Footprint:
    """Keeps all matrices, and the gates and states of every step; an LSTM its biases as well."""
    name, x, state = base(call.op).removeprefix("aten."), *call.inputs[:2]
    saves = tuple(k for k, v in enumerate(call.inputs) if name == "lstm" or len(v.shape) > 1)
    once = float(prod(state.shape) * x.itemsize)
    if name.endswith("_cell"):
        return Footprint(saves, extra=once * CELL[name.removesuffix("_cell")])
    steps = prod(x.shape[:-1]) // max(1, state.shape[1])
    factor = ON_CPU[name] if call.on_cpu else CELL[name] + 2
    return Footprint(saves, (0,), extra=max(0.0, once * steps * factor - call.nbytes))
