"""Compares the states of other objects among the ranks, once, since a checkpoint keeps those of rank 0 for all.

Pieces may differ. They are refused where two ranks have one path for tensors that are not parts of one another, as
stages have that number their tensors. What else differs is said in one line on rank 0. Of tensors, shapes and up to
4096 elements are compared.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.core.errors import InputError, MismatchError
from autoddl.runtime.batches import PLAIN, digest, sampled
from autoddl.runtime.checkpoints.state_pieces import Path, StateParts
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.told_values import gather_values

__all__ = ["compare_names", "compare_states"]


def compare_names(names: list[str]) -> None:
    """Raises MismatchError unless all ranks give objects of the same names; every rank calls it."""
    for rank, theirs in enumerate(_of_all(names)):
        if theirs != names:
            raise MismatchError(f"rank {rank} keeps the states of {', '.join(theirs) or 'nothing'} beside the model, "
                                f"and this one of {', '.join(names) or 'nothing'}: give the same names on every rank")


def compare_states(states: Mapping[str, StateParts]) -> None:
    """Warns on rank 0 of the states that differ among the ranks; every rank calls it, with the same names.

    Raises InputError where two ranks have different tensors for one piece."""
    every = _of_all({name: [_described(one.pieces), _digests(one)] for name, one in states.items()})
    for name in states:
        _check_pieces(name, [theirs[name][0] for theirs in every])
        if (found := _first_difference([theirs[name][1] for theirs in every])) and dist.get_rank() == 0:
            key, rank, other = found
            warnings.warn(f"the state of {name} is another on rank {other} than on rank {rank}, {key} for one: a "
                          f"checkpoint keeps that of rank {rank} for all ranks; give what is a rank's own as DTensors, "
                          "like clones of the model's parameters, and leave out what may be lost", stacklevel=4)


def _of_all(value: Any) -> list[Any]:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    try:
        return gather_values(value)
    except RuntimeError as error:
        raise peer_error("comparing what the ranks keep beside the model", error) from error


def _described(pieces: Mapping[Path, Tensor]) -> dict[str, list[Any]]:
    """By path, what is equal for all pieces of one tensor: shape, dtype, and the ranks of its mesh if it has one."""
    return {json.dumps(path): [list(value.shape), str(value.dtype), value.device_mesh.mesh.tolist()
                               if isinstance(value, DTensor) else None] for path, value in pieces.items()}


def _check_pieces(name: str, ranks: list[dict[str, list[Any]]]) -> None:
    """Raises InputError where the ranks' pieces of one path are not of one tensor."""
    known: dict[str, tuple[int, list[Any]]] = {}
    for rank, pieces in enumerate(ranks):
        for path, one in pieces.items():
            first, other = known.setdefault(path, (rank, one))
            if one != other:
                raise InputError(f"the state of {name} has at {path} one tensor on rank {first} and another on rank "
                                 f"{rank}: keep tensors of the model by the names of its parameters, which are others "
                                 "on other stages")


def _digests(parts: StateParts) -> list[dict[str, str]]:
    """Hashes of the rest by its outermost keys, and of whole pieces by their paths."""
    rest = parts.rest if isinstance(parts.rest, Mapping) else {"all of it": parts.rest}
    return [{str(key): _digest(value) for key, value in rest.items()},
            {json.dumps(path): _digest(value) for path, value in parts.pieces.items()
             if not isinstance(value, DTensor)}]


def _first_difference(ranks: list[list[dict[str, str]]]) -> tuple[str, int, int] | None:
    """A key whose values differ, and two ranks on which they do. Whole pieces may lack on some: they are of stages."""
    known: dict[str, tuple[int, str]] = {}
    for rank, (rest, wholes) in enumerate(ranks):
        for key in (*ranks[0][0], *rest):
            if rest.get(key) != ranks[0][0].get(key):
                return key, 0, rank
        for key, one in wholes.items():
            first, other = known.setdefault(key, (rank, one))
            if one != other:
                return key, first, rank
    return None


def _digest(value: Any) -> str:
    """A hash of a value: equal for equal numbers, texts, tensors and containers of them."""
    if isinstance(value, Tensor):
        said = f"{value.dtype}{list(value.shape)}{digest(sampled(value.detach()))}"
    elif isinstance(value, Mapping):
        said = "".join(f"{key!r}{_digest(inner)}" for key, inner in value.items())
    elif isinstance(value, list | tuple):
        said = "".join(map(_digest, value))
    else:
        said = repr(value) if isinstance(value, PLAIN) else str(type(value))
    return hashlib.blake2b(f"{type(value).__name__} {said}".encode(), digest_size=8).hexdigest()
