"""Writes the files of a checkpoint, a tensor at the price of its bytes.

A file of torch.distributed.checkpoint is a row of values, each as torch.save writes it: a zip archive of its own.
Around the bytes of a tensor that archive is the same for all tensors of one dtype and shape, but for checksums:

    torch.save(tensor) = head(dtype, shape) + bytes of the tensor + tail(dtype, shape, checksum of these bytes)

So heads and tails are made once, by torch.save of zeros, and a tail gets its checksum as the bytes are written. A
writer that is used again tells the first rank only what has moved in its file: values that are no tensors. They come
last, so that tensors stay at their places while the plan of the save is the same.
"""

import io
import os
import struct
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autoddl.runtime.checkpoints.repeated_planner import RepeatedPlanner

__all__ = ["CheckpointWriter", "Frame", "frame"]

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
        self._metadata: Metadata | None = None
        self._places: dict[MetadataIndex, Any] = {}
        self._values = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks with the names of their files; on the first rank."""
        if any(plan.usable for plan in plans):
            self._metadata, self._places, self._values = None, {}, sum(len(plan.items) for plan in plans)
        found: list[SavePlan] = super().prepare_global_plan(plans)
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the values of `plan`; the places of those that are new to the first rank."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results, known = list[WriteResult](), plan is self._written
        with Path(self.path, name).open("wb") as file:
            for item in sorted(plan.items, key=_is_bytes):
                start = file.tell()
                self._write(item, planner, file)
                if not known or _is_bytes(item):
                    length = file.tell() - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        self._written = plan
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, item: WriteItem, planner: SavePlanner, file: io.BufferedWriter) -> None:
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            file.write(value.getbuffer())
            return
        value = value.detach().cpu().contiguous()
        if value.nbytes >= LARGE:
            torch.save(value if value.nbytes == value.untyped_storage().nbytes() else value.clone(), file)
            return
        key = (value.dtype, value.shape)
        if key not in self._frames:
            self._frames[key] = frame(*key)
        around, data = self._frames[key], value.reshape(-1).view(torch.uint8).numpy().data
        file.write(around.head)
        file.write(data)
        file.write(around.tail_of(data))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, with the places of all values; on the first rank. It names what is whole alone."""
        self._metadata = self._metadata or metadata
        self._places |= {one.index: one.storage_data for part in results for one in part}
        if len(self._places) != self._values:
            raise ValueError(f"{len(self._places)} of {self._values} values have a place in a file")
        places = [WriteResult(index, 0, place) for index, place in self._places.items()]
        super().finish(replace(self._metadata), [places])


def _is_bytes(item: WriteItem) -> bool:
    return bool(item.type == WriteItemType.BYTE_IO)
