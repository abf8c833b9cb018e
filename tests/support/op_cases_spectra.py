"""Calls with complex numbers, and Fourier transforms, on which their rules are tested: 5, 6 and 7 are uneven."""

import torch
from op_cases import f, positive
from torch import Tensor

from autoddl.operators.trials.cases import Case, case

__all__ = ["CASES"]


def c(*shape: int) -> Tensor:
    """Complex numbers."""
    return torch.complex(f(*shape), f(*shape))


def _transforms() -> list[Case]:
    """Every transform of real or complex numbers: in the last dims, and in named ones with a length of their own."""
    found = []
    for name in ["fft", "ifft", "hfft", "irfft", "rfft", "ihfft"]:
        given = f if name in ("rfft", "ihfft") else c
        found += [case(f"aten.fft_{name}.default", given(5, 6)),
                  case(f"aten.fft_{name}.default", given(5, 6, 4), 6, 1, "ortho")]
        for end, dims in (("2", [0, 2]), ("n", [2, 0])):
            found += [case(f"aten.fft_{name}{end}.default", given(5, 6, 4)),
                      case(f"aten.fft_{name}{end}.default", given(5, 6, 4), None, dims)]
    return found


CASES = [
    *_transforms(),
    *(case(f"aten.fft_{name}.default", *args) for name in ("fftshift", "ifftshift") for args in (
        (c(5, 6),), (f(5, 6, 4), [1]))),
    case("aten._fft_c2c.default", c(5, 6, 4), [1], 0, True),
    case("aten._fft_c2c.default", c(5, 6, 4), [0, 2], 1, False),
    case("aten._fft_r2c.default", f(5, 6, 4), [1], 0, True), case("aten._fft_r2c.default", f(5, 6), [1], 2, False),
    case("aten._fft_c2r.default", c(5, 4, 6), [1], 0, 6), case("aten._fft_c2r.default", c(5, 4), [1], 2, 7),
    case("aten.stft.default", f(5, 40), 8, 4, 8, positive(8), False, True, True),
    case("aten.stft.default", f(40), 8, 4, None, None, False, True, True),
    case("aten.stft.center", f(5, 40), 8, 4, 8, positive(8), True, "constant", False, True, True),
    case("aten.stft.center", f(6, 40), 8, return_complex=True),
    case("aten.istft.default", c(5, 5, 7), 8, 4, 8, positive(8), length=20),
    case("aten.istft.default", c(5, 7), 8, 4),
    case("aten.view_as_real.default", c(5, 6)), case("aten.view_as_real.default", c(7)),
    case("aten.view_as_complex.default", f(5, 6, 2)), case("aten.view_as_complex.default", f(7, 2)),
    case("aten.complex.default", f(5, 6), f(5, 6)), case("aten.complex.default", f(5, 6), f(6)),
    case("aten.polar.default", f(5, 6), f(5, 6)), case("aten.polar.default", f(7), f(7)),
    *(case(f"aten.{name}.default", c(*shape)) for name in (
        "angle", "_conj", "conj", "conj_physical", "resolve_conj", "resolve_neg", "real", "imag")
      for shape in ((5, 6), (7,))),
    case("aten.mul.Tensor", c(5, 6), c(6)), case("aten.mul.Tensor", f(5, 6), c(5, 1)),
    case("aten.abs.default", c(5, 6)),
    case("aten.bmm.default", c(3, 5, 6), c(3, 6, 7)), case("aten.sum.dim_IntList", c(5, 6), [1]),
]
