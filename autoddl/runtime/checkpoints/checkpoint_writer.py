"""Writes the files of a checkpoint, a tensor at the price of its bytes.

A file of torch.distributed.checkpoint is a row of values, each as torch.save writes it: a zip archive of its own.
Around the bytes of a tensor that archive is the same for all tensors of one dtype and shape, but for checksums:

    torch.save(tensor) = head(dtype, shape) + bytes of the tensor + tail(dtype, shape, checksum of these bytes)

So heads and tails are made once, by torch.save of zeros, and a tail gets its checksum as the bytes are written. A
writer that is used again tells the first rank only what has moved in its file: values that are no tensors. They come
last, so that tensors stay at their places while the plan of the save is the same. The bytes of tensors lie where they
did (`staging`), and are written from there, many in one call of the system. Metadata in which nothing has moved are
written as they were.
"""

import io
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _metadata_fn, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autoddl.runtime.checkpoints.repeated_planner import RepeatedPlanner

__all__ = ["CheckpointWriter", "Frame", "frame"]

AT_ONCE = 1000
"""Pieces of memory that one call of the system writes."""

LARGE = 1 << 24
"""Bytes of a tensor from which on torch.save costs little beside them: it writes such a tensor itself."""
LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip archive's member: the lengths of its name and of its extra field, which its bytes follow."""
DIRECTORY_ENTRY = struct.Struct("<28xHHH12x")
"""Of a member in the directory of a zip archive: the lengths of its name, of its extra field and of its comment."""
DESCRIBED = 1 << 3
"""The flag of a member whose bytes are followed by a record of their checksum and length."""
CHECKSUM = struct.Struct("<I")
RECORD_CHECKSUM, ENTRY_CHECKSUM = 4, 16
"""Where the checksum lies in such a record, and in a member's entry of the directory."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds what torch.save writes before and after the bytes of a tensor; `sums` are the places of their checksum."""

    head: bytes
    tail: bytes
    sums: tuple[int, ...]

    def tail_of(self, data: memoryview) -> bytes:
        """The tail of these bytes."""
        tail, checksum = bytearray(self.tail), crc32(data)
        for place in self.sums:
            CHECKSUM.pack_into(tail, place, checksum)
        return bytes(tail)


def frame(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """Returns what torch.save writes around the bytes of a contiguous tensor of this dtype and shape."""
    file = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype), file)
    data = file.getvalue()
    with zipfile.ZipFile(file) as archive:
        members, entry = archive.infolist(), archive.start_dir
    for member in members:
        if member.filename.endswith("/data/0"):
            break
        entry += DIRECTORY_ENTRY.size + sum(DIRECTORY_ENTRY.unpack_from(data, entry))
    start = member.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack_from(data, member.header_offset))
    end = start + member.file_size
    sums = (RECORD_CHECKSUM,) if member.flag_bits & DESCRIBED else ()
    return Frame(data[:start], data[end:], (*sums, entry + ENTRY_CHECKSUM - end))


class CheckpointWriter(FileSystemWriter):
    """Writes one file of each rank, and of the first the metadata, which comes last; for one save or for many.

    `planner` plans its saves. After a save that failed another writer is needed, on every rank.
    """

    def __init__(self) -> None:
        super().__init__("")
        self.planner = RepeatedPlanner()
        self._frames: dict[tuple[torch.dtype, torch.Size], Frame] = {}
        self._written: SavePlan | None = None
        self._pieces: dict[MetadataIndex, tuple[Frame, memoryview]] = {}
        self._pickled = b""
        self._metadata: Metadata | None = None
        self._places: dict[MetadataIndex, Any] = {}
        self._values = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks with the names of their files; on the first rank."""
        if any(plan.usable for plan in plans):
            self._metadata, self._places, self._values = None, {}, sum(len(plan.items) for plan in plans)
            self._pickled = b""
        found: list[SavePlan] = super().prepare_global_plan(plans)
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the values of `plan`; the places of those that are new to the first rank."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results, known, end = list[WriteResult](), plan is self._written, 0
        if not known:
            self._written, self._pieces = None, {}
        with Path(self.path, name).open("wb") as file:
            row = _Row(file)
            for item in sorted(plan.items, key=_is_bytes):
                start, end = end, end + self._write(item, planner, row)
                if not known or _is_bytes(item):
                    results.append(WriteResult(item.index, end - start, _StorageInfo(name, start, end - start)))
            row.end()
            os.fsync(file.fileno())
        self._written = plan
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, item: WriteItem, planner: SavePlanner, row: "_Row") -> int:
        """Adds a value to the row of values; returns its bytes there."""
        if (piece := self._pieces.get(item.index)) is not None:
            around, data = piece
            return row.add(around.head, data, around.tail_of(data))
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            return row.add(value.getbuffer())
        flat = value.detach().cpu().contiguous()
        if flat.nbytes >= LARGE:
            return row.saved(flat if flat.nbytes == flat.untyped_storage().nbytes() else flat.clone())
        key = (flat.dtype, flat.shape)
        if key not in self._frames:
            self._frames[key] = frame(*key)
        around, data = self._frames[key], flat.reshape(-1).view(torch.uint8).numpy().data
        if flat.data_ptr() == value.data_ptr():  # the bytes of the state itself, which the next save finds here again
            self._pieces[item.index] = around, data
        return row.add(around.head, data, around.tail_of(data))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, with the places of all values; on the first rank. It names what is whole alone."""
        self._metadata = self._metadata or metadata
        new = {one.index: one.storage_data for part in results for one in part}
        if not self._pickled or any(self._places.get(index) != place for index, place in new.items()):
            self._places |= new
            self._pickled = b""
        if len(self._places) != self._values:
            raise ValueError(f"{len(self._places)} of {self._values} values have a place in a file")
        self._pickled = self._pickled or pickle.dumps(
            replace(self._metadata, storage_data=self._places, version=CURRENT_DCP_VERSION))
        writing = Path(self.path, f"{_metadata_fn}.tmp")
        with writing.open("wb") as file:
            file.write(self._pickled)
            file.flush()
            os.fsync(file.fileno())
        writing.replace(Path(self.path, _metadata_fn))


class _Row:
    """Values that are written one behind the other, many in one call of the system."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._waiting = file, list[memoryview]()

    def add(self, *parts: bytes | memoryview) -> int:
        """Adds bytes, which must not change until `end`; returns their number."""
        views = [memoryview(part) for part in parts]
        self._waiting += views
        if len(self._waiting) > AT_ONCE:
            self.end()
        return sum(map(len, views))

    def saved(self, value: Tensor) -> int:
        """Adds what torch.save writes; returns its bytes."""
        self.end()
        start = self._file.tell()
        torch.save(value, self._file)
        self._file.flush()
        return self._file.tell() - start

    def end(self) -> None:
        """Writes what waits."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            written = os.writev(self._file.fileno(), waiting[:AT_ONCE])
            done = 0
            while done < len(waiting) and written >= len(waiting[done]):
                written -= len(waiting[done])
                done += 1
            waiting = waiting[done:]
            if written:
                waiting[0] = waiting[0][written:]


def _is_bytes(item: WriteItem) -> bool:
    return bool(item.type == WriteItemType.BYTE_IO)
