"""Captures that tests share: those of equal models alone, seen under equal circumstances."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from captures import kept
from own_functions import Scaled
from ranks import on_ranks
from torch import Tensor, nn

import autoddl
from autoddl.capture import capture as capturing
from autoddl.capture.own_rules import _MARK


class Pair(nn.Module):
    """Two parameters, which may be views of one storage."""

    def __init__(self, storage: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(storage[:4]), nn.Parameter(second)


def apart() -> Pair:
    return Pair(torch.zeros(8), torch.zeros(4))


def shared(start: int = 0) -> Pair:
    storage = torch.zeros(8)
    return Pair(storage, storage[start:start + 4])


def captures(*models: Callable[[], nn.Module]) -> list[object]:
    """What is captured of each model, where a capture is a new object."""
    capture = kept(cast("Callable[..., Any]", lambda *_: object()), lambda: True)
    return [capture(model()) for model in models]


def test_equal_models_are_captured_once_and_those_with_other_storages_are_not() -> None:
    for model in (apart, shared, lambda: shared(4)):
        assert len(set(captures(model, model))) == 1
    assert len(set(captures(apart, shared, lambda: shared(4), lambda: shared(2)))) == 4


@pytest.mark.parametrize("around", [
    lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", torch.float16), torch.no_grad])
def test_a_model_is_captured_again_under_other_circumstances(around: Callable[[], AbstractContextManager[Any]]) -> None:
    capture = kept(cast("Callable[..., Any]", lambda *_: object()), lambda: True)
    found = []
    for circumstance in (nullcontext, around, nullcontext, around):
        with circumstance():
            found.append(capture(apart()))
    assert found[:2] == found[2:] and found[0] != found[1]


def test_a_model_is_captured_again_with_another_rule() -> None:
    capture = kept(cast("Callable[..., Any]", lambda *_: object()), lambda: True)
    found = [capture(apart())]
    try:
        for text in (". ., . -> . ., ., .", "b ., . -> b ., ., .", ". ., . -> . ., ., ."):
            autoddl.rule(Scaled, text)
            found.append(capture(apart()))
    finally:
        delattr(Scaled, _MARK)
    assert len(set(found[:3])) == 3 and found[3] == found[1] and capture(apart()) == found[0]


class Shifted(nn.Module):
    """The mean of inputs and a parameter."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).mean()


def captured_here(shifts: list[float]) -> tuple[int, list[str]]:
    """How many of these models this process captures by itself, and the graphs of all."""
    with patch.object(capturing, "_captured", Mock(wraps=capturing._captured)) as counted:
        graphs = [str(capturing.capture(Shifted(shift), torch.zeros(4)).graph) for shift in shifts]
    return counted.call_count, graphs


@pytest.mark.ranks
def test_ranks_capture_equal_models_once_together_and_others_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, truth), (_, twice) = captured_here([1.0]), captured_here([1.0, 1.0])
    assert twice == truth * 2
    for may_share, counts in ((True, 2), (True, 0), (False, 6)):
        monkeypatch.setattr("ranks.may_share", lambda may_share=may_share: may_share)
        found = on_ranks(2, captured_here, [1.0, 2.0, 1.0])
        assert sum(count for count, _ in found) == counts and all(graphs == truth * 3 for _, graphs in found)
