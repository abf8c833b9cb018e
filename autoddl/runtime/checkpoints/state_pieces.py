"""Takes the states of other objects apart: pieces are stored as the model's weights are, the rest is that of rank 0.

    state_dict() of every rank  ->  pieces by path    DTensors, and what is named and shaped as a whole one of the model
                                ->  the rest          numbers, texts, other tensors; None where a piece was

A path has the keys of nested dicts and the places in lists. It is in the name of the piece in the checkpoint:

    pieces.ema.["shadow", "blocks.0.up.weight"]        of the object that was given as `ema`

A rank reads a piece as its object has the tensor at that path now. Where it has none there, as the model has the tensor
of that name, or else any of that shape. On stages, a rank gets what is of its own stage alone.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from autoddl.core.errors import InputError
from autoddl.core.graph import Kind

if TYPE_CHECKING:
    from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["Path", "StateParts", "own_tensors", "paths_of", "piece_key", "put_together", "taken_apart",
           "wanted_pieces"]

PIECES = "pieces"

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StateParts:
    """The state of one object on this rank: its pieces by path, and the rest."""

    pieces: Mapping[Path, Tensor]
    rest: Any


def own_tensors(model: "ParallelModel") -> dict[str, Tensor | None]:
    """The parameters and buffers of the model by all their names; None for those of other stages."""
    module = model.module
    elsewhere = {name: None for one in model.graph.tensors if one.kind in (Kind.PARAMETER, Kind.BUFFER)
                 for name in (one.fqn, *one.aliases)}
    return {**elsewhere, **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False))}


def piece_key(name: str, path: Path) -> str:
    """The name in a checkpoint of a piece of the object `name`."""
    return f"{PIECES}.{name}.{json.dumps(path)}"


def paths_of(name: str, saved: Iterable[str]) -> list[Path]:
    """The paths of the pieces of the object `name` in a checkpoint that has `saved`."""
    start = f"{PIECES}.{name}.["
    return [tuple(json.loads(key[len(start) - 1:])) for key in saved if key.startswith(start)]


def taken_apart(name: str, state: Any, own: Mapping[str, Tensor | None], copies: Iterable[str] = ()) -> StateParts:
    """Takes the state of the object `name` apart; `own` are the model's tensors.

    Pieces of `copies`, which an earlier stage saves, are in neither part. Raises InputError for a piece that cannot be
    stored."""
    pieces: dict[Path, Tensor] = {}
    rest = _without_pieces(name, state, (), own, pieces)
    left_out = frozenset(copies)
    return StateParts({path: value for path, value in pieces.items() if _own_name(path, own) not in left_out}, rest)


def _without_pieces(name: str, value: Any, path: Path, own: Mapping[str, Tensor | None], pieces: dict[Path, Tensor]
                    ) -> Any:
    """The value with None in place of its pieces, which are added to `pieces`."""
    if isinstance(value, DTensor) or (isinstance(value, Tensor) and _is_whole(path, value, own)):
        _check_piece(name, path, value)
        pieces[path] = value.detach()
        return None
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_pieces(name, inner, (*path, key), own, pieces))
                           for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_without_pieces(name, inner, (*path, n), own, pieces) for n, inner in enumerate(value))
    return value


def _is_whole(path: Path, value: Tensor, own: Mapping[str, Tensor | None]) -> bool:
    """Whether the value has the name and shape of a tensor of the model that is whole on its ranks."""
    one = own.get(_own_name(path, own))
    return one is not None and not isinstance(one, DTensor) and one.shape == value.shape


def _check_piece(name: str, path: Path, value: Tensor) -> None:
    odd = next((key for key in path if type(key) not in (str, int)), None)
    if odd is not None:
        raise InputError(f"the state of {name} has a tensor in pieces under the key {odd!r}, which a checkpoint cannot "
                         "name: give it texts or whole numbers as keys")
    if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
        raise InputError(f"the state of {name} has at {list(path)} parts of a sum that was not taken "
                         f"({value.placements}): redistribute it before, or give full_tensor()")


def _own_name(path: Path, own: Mapping[str, Tensor | None]) -> str:
    """The name of the model's tensor that the last text of a path ends with, as `module.up.weight` does; or ""."""
    name = next((key for key in reversed(path) if isinstance(key, str)), "")
    while name and name not in own:
        name = name.partition(".")[2]
    return name


def wanted_pieces(name: str, one: object, state: Any, model: "ParallelModel", saved: Mapping[str, Any]
                  ) -> dict[Path, Tensor]:
    """Tensors without values for the pieces that this rank reads of the object, whose state is `state` before."""
    own, staged, found = own_tensors(model), model.plan.pipeline is not None, dict[Path, Tensor]()
    for path in paths_of(name, saved):
        there = saved[piece_key(name, path)]
        like = _like(path, torch.Size(there.size), one, state, own, staged)
        if like is not None:
            found[path] = torch.empty_like(like.detach(), dtype=there.properties.dtype)
        elif not staged:
            found[path] = torch.empty(there.size, dtype=there.properties.dtype)
    return found


def _like(path: Path, shape: torch.Size, one: object, state: Any, own: Mapping[str, Tensor | None], staged: bool
          ) -> Tensor | None:
    """A tensor that is laid out as the one at a path is to be: that of the object, or of the model; or None."""
    found = [_at(state, path), own.get(_own_name(path, own))]
    if isinstance(one, torch.optim.Optimizer) and len(path) > 1 and isinstance(path[1], int):
        found += [p for group in one.param_groups for p in group["params"]][path[1]:path[1] + 1]
    if not staged and not _own_name(path, own):
        found += own.values()
    return next((value for value in found if isinstance(value, Tensor) and value.shape == shape), None)


def _at(state: Any, path: Path) -> Any:
    """What a state has at a path; None where there is nothing."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def put_together(rest: Any, pieces: Mapping[Path, Tensor], every: Iterable[Path], before: Any) -> Any:
    """The state of this rank: the rest with its pieces in place.

    Of `every` piece in the checkpoint, those of other stages are left out. A whole tensor is cut where the object has
    pieces `before`."""
    for path in every:
        if path not in pieces:
            _take_out(rest, path)
    for path, value in pieces.items():
        rest = _placed(rest, path, value)
    return _cut(rest, before)


def _take_out(state: Any, path: Path) -> None:
    inner = _at(state, path[:-1])
    if isinstance(inner, dict):
        inner.pop(path[-1], None)


def _placed(state: Any, path: Path, value: Tensor) -> Any:
    """The state with a value at a path; dicts that lead there are made."""
    if not path:
        return value
    key, further = path[0], path[1:]
    if isinstance(state, list | tuple) and isinstance(key, int) and key < len(state):
        return type(state)([*state[:key], _placed(state[key], further, value), *state[key + 1:]])
    state = state if isinstance(state, dict) else {}
    state[key] = _placed(state.get(key), further, value)
    return state


def _cut(value: Any, before: Any) -> Any:
    """The value, with a DTensor in place of a whole tensor where `before` has one."""
    if isinstance(value, dict):
        for key in value:
            value[key] = _cut(value[key], _at(before, (key,)))
    elif type(value) in (list, tuple):
        return type(value)(_cut(inner, _at(before, (n,))) for n, inner in enumerate(value))
    elif isinstance(value, Tensor) and isinstance(before, DTensor) and not isinstance(value, DTensor) \
            and value.shape == before.shape:
        return distribute_tensor(value.to(before.device), before.device_mesh, before.placements, src_data_rank=None)
    return value
