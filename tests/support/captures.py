"""Captures each model once: what a test's process has captured of a model, a sample and a recipe is not captured again.

    capture = kept(autoddl.capture.capture.capture, lambda: True)      the same results, those of equal arguments shared

Arguments are equal where their pickles are, tensors by their values. What does not pickle, like a class that a test
makes or a hook, is captured every time.
"""

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.core.precision import AS_WRITTEN, Precision

__all__ = ["kept"]

MOST = 100
"""Captures that are kept; the oldest goes first."""
LARGEST = 20_000_000
"""Bytes of tensors; what is larger takes longer to compare than to capture."""


class _Pickler(pickle.Pickler):
    nbytes = 0

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value._backward_hooks or type(value) not in (Tensor, nn.Parameter):
            raise pickle.PicklingError
        self.nbytes += 0 if value.is_meta else value.nbytes
        if self.nbytes > LARGEST:
            raise pickle.PicklingError
        data = b"" if value.is_meta else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        about = str(value.dtype), str(value.device), tuple(value.shape), value.stride(), value.requires_grad
        return _rebuilt, (type(value), about, value.__dict__, data)


def _rebuilt(*_: object) -> None:
    """Stands in pickles for a tensor; they are only compared."""


def _digest(*values: object) -> bytes | None:
    out = io.BytesIO()
    try:
        _Pickler(out).dump((*values, torch.get_default_dtype(), torch.is_grad_enabled()))
    except Exception:  # whatever a user's class raises where it is pickled
        return None
    return hashlib.sha256(out.getbuffer()).digest()


def kept(capture: Callable[..., Captured], allowed: Callable[[], bool]) -> Callable[..., Captured]:
    """`capture`, which looks first whether it has captured the like, where that is allowed now."""
    found = OrderedDict[bytes, Captured]()

    @wraps(capture)
    def kept_capture(model: nn.Module, sample: object = None, precision: Precision = AS_WRITTEN) -> Captured:
        key = _digest(model, sample, precision) if allowed() else None
        if key is None:
            return capture(model, sample, precision)
        if key not in found:
            found[key] = capture(model, sample, precision)
            if len(found) > MOST:
                found.popitem(last=False)
        return found[key]

    return kept_capture
