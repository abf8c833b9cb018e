"""Rules of complex numbers and of Fourier transforms, which are linear and work along whole dims.

    fft, rfft2, irfftn     "a . -> a . | 0"                   transformed dims are whole
    stft                   "b ., . -> b . . | 0"              of signals, with a window or without
    istft                  "b . ., . -> b . | 0"
    view_as_real           "a -> a . | 0"                     pairs in a last dim, and back by view_as_complex

A complex number is a pair of real ones: sums, slices and their gradients are those of the pairs. What is linear in the
pairs, as a conjugate is, passes partial sums, and its gradient does.
"""

from autoddl.core.graph import Op
from autoddl.operators.rules.reduce import along_dims
from autoddl.operators.rules.writing import RuleOf, Tensors, dims_of, form, get, ints, names, rule_text

__all__ = ["RULES"]

ONE = "fft ifft rfft irfft hfft ihfft"
SEVERAL = "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2 fftn ifftn rfftn irfftn hfftn ihfftn"
INNER = "_fft_c2c.default _fft_r2c.default _fft_c2r.default"


def _transform(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Named dims; else the last of a transform in one dim, the last two in two, as many as `s` has, or all."""
    rank, kind = len(inputs[0].shape), op.target.split(".")[1]
    lengths = len(ints(get(op, "s")))
    last = 1 if kind.removeprefix("fft_") in ONE.split() else 2 if kind.endswith("2") else lengths or rank
    dims = dims_of(op, rank, empty=range(rank - last, rank))
    return along_dims(dims, inputs, outputs, form(inputs, outputs, ((0,),)))


def _shifted(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Halves of the named dims, or of all, change places."""
    rank = len(inputs[0].shape)
    return along_dims(dims_of(op, rank, empty=range(rank)), inputs, outputs, form(inputs, outputs, ((0,),)))


def _windowed(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """A signal is whole, and so are its frames; signals of a batch split."""
    signal, *others = inputs
    inner = 1 if op.target.startswith("aten.stft") else 2
    batch = names(len(signal.shape) - inner)
    return rule_text([[*batch, *["."] * inner], *(["."] * len(t.shape) for t in others)],
                     [[*batch, *["."] * (len(outputs[0].shape) - len(batch))]], form(inputs, outputs, ((0,),)))


def _pairs(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """The tensor with pairs has one dim more, which is whole."""
    letters = names(min(len(inputs[0].shape), len(outputs[0].shape)))
    real, pairs = letters, [*letters, "."]
    sides = (real, pairs) if op.target == "aten.view_as_real.default" else (pairs, real)
    return rule_text([sides[0]], [sides[1]], form(inputs, outputs, ((0,),)))


RULES: dict[str, RuleOf] = {
    **{f"aten.fft_{name}.default": _transform for name in f"{ONE} {SEVERAL}".split()},
    **{f"aten.{target}": _transform for target in INNER.split()},
    "aten.fft_fftshift.default": _shifted, "aten.fft_ifftshift.default": _shifted,
    "aten.stft.default": _windowed, "aten.stft.center": _windowed, "aten.istft.default": _windowed,
    "aten.view_as_real.default": _pairs, "aten.view_as_complex.default": _pairs,
}
