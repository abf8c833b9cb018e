"""Rules of operators that make a tensor from nothing: every rank makes its piece.

    full, zeros    "-> a b"           the sizes become local
    new_zeros(x)   "., . -> a b"      of x only dtype and device matter
    arange         "-> a"             y[i] = start + i * step: a piece begins at its own offset (kernels)
"""

from autoddl.core.graph import Op
from autoddl.rules_text import RuleOf, Tensors, fixed, names, text

__all__ = ["RULES"]


def _create(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return text([["."] * len(t.shape) for t in inputs], [names(len(outputs[0].shape))])


def _whole(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return fixed(inputs, outputs)


RULES: dict[str, RuleOf] = {
    **{f"aten.{base}.default": _create for base in (
        "full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "arange", "scalar_tensor")},
    "aten.arange.start": _create,
    "aten.arange.start_step": _create,
    "aten.eye.default": _whole,
    "aten.eye.m": _whole,
    "aten.linspace.default": _whole,
    "aten.tril_indices.default": _whole,
    "aten.triu_indices.default": _whole,
}
