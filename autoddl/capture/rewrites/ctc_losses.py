"""Traces losses of connectionist temporal classification (Graves et al. 2006) as an operator of rows.

torch's own reads lengths while it is traced. Ours, `autoddl.ctc_loss`, gives a loss for each row of a batch; its mean
and its sum are written with other operators. Targets are rows of a fixed length (n, s). Where a model strings together
those that a mask selects, as transformers does, they become rows again, the selected ones first:

    masked_select(labels, mask)     labels in the order of (not mask), which is stable
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CtcLosses"]

torch.library.define("autoddl::ctc_loss", "(Tensor log_probs, Tensor targets, Tensor input_lengths, "
                     "Tensor target_lengths, int blank, bool zero_infinity) -> Tensor")


@torch.library.register_fake("autoddl::ctc_loss")  # type: ignore[untyped-decorator]
def _like(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
          zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@dataclass(frozen=True)
class CtcLosses:
    """The losses of one trace; `selected` are (what was selected, labels, mask), all so far."""

    selected: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def instead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a call of torch yields in a trace; None where it is none of these, or of another form."""
        if func in (torch.masked_select, Tensor.masked_select) and not kwargs and _are_rows(*args[:2]):
            self.selected.append((func(*args), *args[:2]))
            return self.selected[-1][0]
        return self._loss(*args, **kwargs) if func is F.ctc_loss else None

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor | None:
        given = inspect.signature(F.ctc_loss).bind(*args, **kwargs)
        given.apply_defaults()
        log_probs, targets, inputs, lengths, blank, reduction, zero = given.arguments.values()
        rows = targets if targets.dim() == 2 else next(
            (_rows(labels, mask) for found, labels, mask in self.selected if found is targets), None)
        if rows is None or log_probs.dim() != 3:
            return None
        inputs, lengths = (torch.as_tensor(one, device=log_probs.device) for one in (inputs, lengths))
        losses: Tensor = torch.ops.autoddl.ctc_loss(log_probs, rows, inputs, lengths, blank, zero)
        if reduction == "mean":
            return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()
        return losses.sum() if reduction == "sum" else losses


def _are_rows(labels: Tensor, mask: Tensor) -> bool:
    return labels.dim() == 2 and labels.shape == mask.shape


def _rows(labels: Tensor, mask: Tensor) -> Tensor:
    """The selected labels of each row in front, zeros behind."""
    order = (~mask).to(torch.int64).argsort(dim=1, stable=True)
    return labels.masked_fill(~mask, 0).gather(1, order)
