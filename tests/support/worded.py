"""A model of which only the names are known: blocks, and modules before and behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoddl.export.target import TensorPiece

__all__ = ["WordedModel"]


@dataclass(frozen=True)
class WordedModel:
    """What a target's text says of a model of so many blocks."""

    count: int
    model: str = "worded"
    tokens: int = 8192
    pieces: tuple[TensorPiece, ...] = ()
    norms: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    factory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}" for i in range(self.count))

    @property
    def units(self) -> tuple[str, ...]:
        return ("tokens", *self.blocks, "norm", "head")
