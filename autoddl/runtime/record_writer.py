"""A rank's record of its steps: what its recorder marked, as one line per step in the file of all ranks.

The first rank makes the file before the ranks meet; each appends whole lines, one system call each, so that lines of
several ranks do not mix and whoever is killed leaves what it had finished. Ranks of several machines write a part each,
FILE.0, FILE.1, ...
"""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autoddl.core.errors import InputError, MachineError
from autoddl.core.plan import Plan, level_of
from autoddl.core.record import Event, Header, RecordedStep, header_text, step_text
from autoddl.runtime.recorder import Mark, Recorder

__all__ = ["RecordWriter", "header_of", "step_of"]


def header_of(plan: Plan) -> Header:
    return Header(plan.fingerprint(), plan.model, str(plan.mesh), plan.cluster, plan.backend, plan.mesh.size,
                  {name: _version(name) for name in ("autoddl", "torch")})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def step_of(plan: Plan, recorder: Recorder, number: int, rank: int, start: int, end: int) -> RecordedStep:
    """What `recorder` marked between `start` and `end`, in nanoseconds of perf_counter_ns."""
    began = time.time() - (time.perf_counter_ns() - start) / 1e9
    passes = tuple((name, (at - start) / 1e9) for name, at in recorder.passes)
    events = tuple(_event(plan, mark, number, rank, start) for mark in recorder.marks)
    return RecordedStep(number, rank, began, (end - start) / 1e9, passes, events)


def _event(plan: Plan, mark: Mark, number: int, rank: int, zero: int) -> Event:
    """One that was done before it was waited for exposes nothing; else its end is seen when waiting ends."""
    one, waited = mark.executed, mark.done > mark.waited
    end = mark.resumed if waited else mark.done
    return Event(number, rank, one.direction, one.kind, one.axes, level_of(plan, one.axes), one.nbytes,
                 (mark.start - zero) / 1e9, (end - zero) / 1e9, (end - mark.waited) / 1e9 if waited else 0.0,
                 mark.origin)


class RecordWriter:
    """Writes rank `rank`'s steps to `path`; `alone`: nobody else writes to that file."""

    def __init__(self, path: str | Path, plan: Plan, rank: int, alone: bool = False) -> None:
        self._path, self._plan, self._rank = Path(path), plan, rank
        if rank == 0 or alone:
            try:
                if rank == 0 and alone:
                    self._path.with_suffix("").unlink(missing_ok=True)  # of an earlier run in one file
                self._path.write_text(header_text(header_of(plan)), encoding="utf-8")
            except OSError as error:
                raise InputError(f"cannot write the record {path}: {error.strerror or error}; give another place with "
                                 "--record FILE, or --no-record") from None

    def write(self, recorder: Recorder, number: int, start: int, end: int) -> None:
        """Step `number`, which took from `start` to `end` (perf_counter_ns)."""
        line = step_text(step_of(self._plan, recorder, number, self._rank, start, end)).encode()
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            raise MachineError(f"cannot write the record {self._path}: {error.strerror or error}; give another place "
                               "with --record FILE, or --no-record") from None
