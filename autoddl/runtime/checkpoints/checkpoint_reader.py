"""Reads the files of a checkpoint without running what someone may have written into them.

torch.distributed.checkpoint unpickles the metadata, and values that are no tensors: a crafted pickle runs a command.
Here the metadata may name the classes of torch's own metadata alone, and other values plain types and tensors alone.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from autoddl.core.errors import MismatchError

__all__ = ["CheckpointReader", "quietly", "read"]

METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset((
    *((METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                                    "StorageMeta", "TensorProperties", "TensorStorageMetadata",
                                    "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("collections", "OrderedDict")))
"""Classes and functions that a checkpoint's metadata is made of."""


class _Metadata(pickle.Unpickler):
    """Unpickles what `ALLOWED` and dtypes can say."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")


class CheckpointReader(FileSystemReader):
    """Reads the folder of a checkpoint; raises MismatchError where its metadata names anything but metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            try:
                metadata = _Metadata(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ImportError) as error:
                raise MismatchError(f"{self.path} is not read: its .metadata is not what a save writes ({error}); load "
                                    "another checkpoint") from error
        if not isinstance(metadata, Metadata):
            raise MismatchError(f"{self.path} is not read: its .metadata is a {type(metadata).__name__}; load another "
                                "checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors as plain types."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=True)
        super().load_bytes(read_item, _saved(found))


def _saved(value: Any) -> io.BytesIO:
    """A file of a value that was read safely, which the planner reads once more."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def read(state: dict[str, Any], reader: CheckpointReader, no_dist: bool) -> None:
    """Reads the checkpoint of `reader` into `state`, as `torch.distributed.checkpoint.load` does."""
    with quietly() if no_dist else nullcontext():
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=no_dist)


@contextmanager
def quietly() -> Iterator[None]:
    """Silences the warning that there is no process group: one process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
