"""Captures each model once: what a test's process has captured of a model, a sample and a recipe is not captured again.

    capture = kept(autoddl.capture.capture.capture, lambda: True)      the same results, those of equal arguments shared
    capture = kept(..., others)                                        also those of other processes (`ranks`)

Arguments are equal where their pickles are, tensors by their values and by which of them share storage. What does not
pickle, like a class that a test makes or a hook, is captured every time. What else a capture sees is compared too:
autocast, the default dtype, gradients, and the rules of the user's own.
"""

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.capture.own_rules import OwnRule, rule_of
from autoddl.core.precision import AS_WRITTEN, Precision

__all__ = ["Others", "kept"]

MOST = 100
"""Captures that are kept; the oldest goes first."""
LARGEST = 20_000_000
"""Bytes of tensors; what is larger takes longer to compare than to capture."""


@dataclass
class Others:
    """Processes that capture too. They know the user's own rules by the same numbers, those registered before they were
    forked; where there are others, none is asked."""

    found: OrderedDict[bytes, Captured] = field(default_factory=OrderedDict)
    """What this process has captured, by digest, the oldest first."""
    ask: Callable[[bytes, Callable[[], Captured]], Captured] | None = None
    """On a rank: what another process has captured, or else what the function captures here, for all."""
    numbers: dict[OwnRule, int] = field(default_factory=dict)
    """The rules that this process has seen."""
    common: int = 0
    """How many of these all processes know."""

    def know_rules(self) -> None:
        """Numbers the rules that are registered now, just before other processes are forked."""
        self.numbered()
        self.common = len(self.numbers)

    def numbered(self) -> list[tuple[str, int]]:
        """The operators with a rule of the user's own, and the numbers of the rules."""
        return sorted((name, self.numbers.setdefault(own, len(self.numbers))) for name, own in _rules())


class _Pickler(pickle.Pickler):
    nbytes = 0

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages = dict[int, tuple[int, object]]()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value._backward_hooks or type(value) not in (Tensor, nn.Parameter):
            raise pickle.PicklingError
        self.nbytes += 0 if value.is_meta else value.nbytes
        if self.nbytes > LARGEST:
            raise pickle.PicklingError
        data = b"" if value.is_meta else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        storage = value.untyped_storage()
        place, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        about = str(value.dtype), str(value.device), tuple(value.shape), value.stride(), value.requires_grad
        return _rebuilt, (type(value), about, value.__dict__, data, place, value.storage_offset())


def _rebuilt(*_: object) -> None:
    """Stands in pickles for a tensor; they are only compared."""


def _rules() -> Iterator[tuple[str, OwnRule]]:
    """The rules of the user's own that are registered now, each with what it stands on."""
    packets = [packet for space in list(vars(torch.ops).values()) if isinstance(space, torch._ops._OpNamespace)
               for packet in list(vars(space).values()) if isinstance(packet, torch._ops.OpOverloadPacket)]
    yield from ((str(operator), own) for packet in packets for operator in list(vars(packet).values())
                if isinstance(operator, torch._ops.OpOverload) and (own := rule_of(operator)))
    classes = [torch.autograd.Function]
    for one in classes:
        classes += one.__subclasses__()
        if own := rule_of(one):
            yield f"{one.__module__}.{one.__qualname__}", own


def _around() -> tuple[object, ...]:
    """What a capture sees beside its arguments."""
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")]
    return torch.get_default_dtype(), torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled()


def _digest(*values: object) -> bytes | None:
    out = io.BytesIO()
    try:
        _Pickler(out).dump((*values, _around()))
    except Exception:  # whatever a user's class raises where it is pickled
        return None
    return hashlib.sha256(out.getbuffer()).digest()


def kept(capture: Callable[..., Captured], allowed: Callable[[], bool], others: Others | None = None
         ) -> Callable[..., Captured]:
    """`capture`, which looks first whether it has captured the like, or others have, where that is allowed now."""
    others = others or Others()

    @wraps(capture)
    def kept_capture(model: nn.Module, sample: object = None, precision: Precision = AS_WRITTEN) -> Captured:
        rules = others.numbered()
        key = _digest(model, sample, precision, rules) if allowed() else None
        make = partial(capture, model, sample, precision)
        if key is None:
            return make()
        found = others.found
        if key not in found:
            ask = others.ask if all(number < others.common for _, number in rules) else None
            found[key] = ask(key, make) if ask else make()
            if len(found) > MOST:
                found.popitem(last=False)
        return found[key]

    return kept_capture
