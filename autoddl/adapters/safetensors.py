"""Reads and writes weights as Hugging Face has them: safetensors files, one or several with an index.

    load_safetensors(model, folder)      every rank reads of each tensor the slice that it stores, a plain module all
    save_safetensors(model, folder)      tensors are brought to rank 0 one at a time, which writes them file by file

    model.safetensors                                        or, above a limit of bytes,
    model-00001-of-00002.safetensors ...                     with model.safetensors.index.json:
    {"metadata": {"total_size": ...}, "weight_map": {name: file}}

A tied weight is written once, under the name that transformers keeps, and read under any of its names. Names may lack
the prefix of the model's base, as those of a model without its head do. The format is described at
huggingface.co/docs/safetensors.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.adapters.module import parallel_behind
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.files import write_atomically
from autoddl.runtime.checkpoints.checkpoint import is_first
from autoddl.runtime.collectives.told_values import gather_values
from autoddl.runtime.parallel_model import ParallelModel
from autoddl.runtime.whole_state import StateTensor, state_tensors, whole_tensors

__all__ = ["load_safetensors", "save_safetensors"]

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LIMIT = 5 * 10**9
"""Bytes of a file, above which there are several."""


def load_safetensors(model: ParallelModel | nn.Module, folder: str | Path, strict: bool = True) -> None:
    """Reads the weights of a folder, or of one file, into the pieces of this rank. Every rank calls it.

    A plain module reads whole tensors, each rank by itself, and tied ones under any of their names. Floating values
    are converted to the dtypes of the module, or in which the plan stores them. Raises MismatchError on every rank for
    what is no such folder, and for a tensor that is missing or of another shape. With `strict` it raises that for one
    that the model does not have, too.
    """
    plain = isinstance(model, nn.Module)
    try:
        files = _files(Path(folder))
        read, failure = sorted(_read_all(model, Path(folder), files)), ""
    except InputError as error:
        files, read, failure = {}, [], str(error)
    alone = plain or not (dist.is_available() and dist.is_initialized())
    told: list[tuple[list[str], str]] = [(read, failure)] if alone else gather_values([read, failure])
    failure = next((said for _, said in told if said), "")
    if failure:
        raise MismatchError(failure)
    every = model.state_dict() if isinstance(model, nn.Module) else \
        [name for one in state_tensors(model) for name in one.names]
    left = set(files).difference(*(names for names, _ in told), every)
    if strict and left:
        raise MismatchError(f"{folder} has {min(left)}, which the model does not"
                            f"{f', and {len(left) - 1} more' * (len(left) > 1)}: give the weights of this model, or "
                            "strict=False to leave them out")


def _read_all(model: ParallelModel | nn.Module, folder: Path, files: Mapping[str, Path]) -> set[str]:
    """Reads every tensor of this rank; returns the names that were read."""
    module = model if isinstance(model, nn.Module) else model.module
    read, prefix = set[str](), getattr(module, "base_model_prefix", "")
    for names, value in _by_names(module.state_dict(keep_vars=True)).items():
        found = _found(names, files, prefix)
        if found is None:
            raise MismatchError(f"{folder} has no tensor {names[0]}: give the weights of this model")
        try:
            _read(files[found], found, value, model, names)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{files[found]} cannot be read as safetensors: {error}") from error
        read.add(found)
    return read


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor by name. Raises InputError where there are none."""
    if folder.is_file():
        return _names_in(folder)
    if (folder / INDEX).is_file():
        try:
            mapped = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(str(file)).name for name, file in mapped.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder / INDEX} is no index of safetensors: it needs a weight_map of names and files "
                             f"({error})") from error
    if (folder / ONE).is_file():
        return _names_in(folder / ONE)
    raise InputError(f"{folder} has no {ONE} and no {INDEX}: give a folder that save_pretrained or save_safetensors "
                     "wrote, or one safetensors file")


def _names_in(file: Path) -> dict[str, Path]:
    try:
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} cannot be read as safetensors: {error}") from error


def _by_names(state: Mapping[str, Any]) -> dict[tuple[str, ...], Tensor]:
    """The tensors of a state by all their names."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    return {tuple(every): state[every[0]] for every in names.values()}


def _found(names: Sequence[str], files: Mapping[str, Path], prefix: str) -> str | None:
    """The name under which a tensor is in the files."""
    short = [name.removeprefix(f"{prefix}.") for name in names] if prefix else []
    return next((name for name in (*names, *short) if name in files), None)


def _read(file: Path, name: str, value: Tensor, model: ParallelModel | nn.Module, names: Sequence[str]) -> None:
    """Reads this rank's piece of tensor `name` into `value`."""
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    with safe_open(file, framework="pt") as opened:
        whole = opened.get_slice(name)
        if list(whole.get_shape()) != list(value.shape):
            raise MismatchError(f"{name} is {whole.get_shape()} in {file}, and {list(value.shape)} in the model: give "
                                "the weights of this model")
        if not isinstance(model, nn.Module) and isinstance(value, nn.Parameter) and value.dim():
            piece = whole[tuple(slice(offset, offset + size) for offset, size in model.piece(_stored(model, names)))]
        else:
            piece = opened.get_tensor(name)
    with torch.no_grad():
        local.copy_(piece)


def _stored(model: ParallelModel, names: Sequence[str]) -> str:
    """The name under which the plan stores a parameter."""
    return next(name for runner in model.runners() for name in names if name in runner.stored)


def save_safetensors(model: ParallelModel | nn.Module, folder: str | Path, file_bytes: int = LIMIT) -> None:
    """Writes the model's weights to a folder, as `from_pretrained` of transformers reads them. Every rank calls it.

    `model` is what `parallelize` returned, or its planned module. Rank 0 holds one file of at most `file_bytes` at a
    time, or one tensor that is larger. Files replace those of the same names when they are complete. Raises
    MachineError on every rank where the folder cannot be written, InputError for a module that runs no plan.
    """
    model = parallel_behind(model)
    path, tied = Path(folder), getattr(model.module, "_tied_weights_keys", None) or ()
    parts = _parts(state_tensors(model), file_bytes)
    files = [ONE] if len(parts) == 1 else [f"model-{k + 1:05}-of-{len(parts):05}.safetensors"
                                           for k in range(len(parts))]
    named = {one.names: _kept(one.names, tied) for part in parts for one in part}
    failure, values = "", whole_tensors(model)
    for file, part in zip(files, parts, strict=True):
        tensors: dict[str, Tensor] = {}
        for _ in part:
            one, value = next(values)
            if value is not None and not failure:
                tensors[named[one.names]] = value.cpu().contiguous()
        failure = failure or _written(path / file, tensors)
    if len(parts) > 1 and not failure and is_first():
        mapped = {named[one.names]: file for file, part in zip(files, parts, strict=True) for one in part}
        total = sum(one.nbytes for part in parts for one in part)
        failure = _indexed(path / INDEX, {"metadata": {"total_size": total}, "weight_map": mapped})
    said = gather_values(failure)[0] if dist.is_available() and dist.is_initialized() else failure
    if said:
        raise MachineError(f"the weights were not written to {folder}: {said}")


def _parts(every: Sequence[StateTensor], limit: int) -> list[list[StateTensor]]:
    """The tensors of each file, in order."""
    parts: list[list[StateTensor]] = [[]]
    for one in every:
        if parts[-1] and sum(other.nbytes for other in parts[-1]) + one.nbytes > limit:
            parts.append([])
        parts[-1].append(one)
    return parts


def _kept(names: Sequence[str], tied: Any) -> str:
    """The name under which a tensor is written: one that transformers does not restore from another."""
    return next((name for name in names if name not in tied), names[0])


def _written(file: Path, tensors: dict[str, Tensor]) -> str:
    """Writes a file on rank 0; returns the error, "" without one."""
    if not is_first():
        return ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.writing")
        beside.touch()
        mode = beside.stat().st_mode  # of a new file; one that safetensors writes is for its owner alone
        save_file(tensors, beside, metadata={"format": "pt"})
        beside.chmod(mode)
        os.replace(beside, file)
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def _indexed(file: Path, index: dict[str, Any]) -> str:
    """Writes the index; returns the error, "" without one."""
    try:
        write_atomically(file, json.dumps(index, indent=2) + "\n")
    except InputError as error:
        return str(error)
    return ""
