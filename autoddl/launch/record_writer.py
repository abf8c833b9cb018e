"""Writes a rank's record: the marks of its recorder, as one line per step in the file of all ranks.

The first rank makes the file before the ranks meet. Each rank appends whole lines, with one system call each. So lines
of several ranks do not mix, and a rank that is killed leaves its finished steps. Ranks of several machines write a part
each, FILE.0, FILE.1, ...
"""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autoddl.core.errors import InputError, MachineError
from autoddl.core.plan import Plan, level_of
from autoddl.core.record import Event, Header, RecordedStep, header_text, step_text
from autoddl.runtime.collectives.recorder import Mark, Recorder

__all__ = ["RecordWriter", "header_of", "step_of"]


def header_of(plan: Plan) -> Header:
    """The header of a record of this plan, with the versions of the libraries."""
    return Header(plan.fingerprint(), plan.model, str(plan.mesh), plan.cluster, plan.backend, plan.mesh.size,
                  {name: _version(name) for name in ("autoddl", "torch")})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def step_of(plan: Plan, recorder: Recorder, number: int, rank: int, start: int, end: int) -> RecordedStep:
    """The marks of `recorder` between `start` and `end`, nanoseconds of perf_counter_ns, as a recorded step."""
    began = time.time() - (time.perf_counter_ns() - start) / 1e9
    passes = tuple((name, (at - start) / 1e9) for name, at in recorder.passes)
    events = tuple(_event(plan, mark, number, rank, start) for mark in recorder.marks)
    return RecordedStep(number, rank, began, (end - start) / 1e9, passes, events)


def _event(plan: Plan, mark: Mark, number: int, rank: int, zero: int) -> Event:
    """The event of a mark: nothing is exposed if it was done before it was waited for; else it ends with the wait."""
    one, waited = mark.executed, mark.done > mark.waited
    end = mark.resumed if waited else mark.done
    return Event(number, rank, one.direction, one.kind, one.axes, level_of(plan, one.axes), one.nbytes,
                 (mark.start - zero) / 1e9, (end - zero) / 1e9, (end - mark.waited) / 1e9 if waited else 0.0,
                 mark.origin, mark.algorithm, mark.words)


class RecordWriter:
    """Writes the steps of one rank to `path`; `alone` says that no other rank writes to that file."""

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
        """Appends step `number`, from `start` to `end` (perf_counter_ns). Raises MachineError where that fails."""
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
