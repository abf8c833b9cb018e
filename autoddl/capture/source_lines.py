"""Finds the line of the user's code in which an operator was called."""

import linecache
import os
import re
from types import TracebackType

import torch

__all__ = ["failing_line", "line_of"]

FRAME = re.compile(r'File "(.+?)", line (\d+)')
TORCH = os.path.dirname(torch.__file__) + os.sep
ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
OURS = (TORCH, ROOT, os.path.dirname(os.__file__) + os.sep, "<eval_with_key>", "<frozen")
LIBRARIES = (*OURS, f"{os.sep}site-packages{os.sep}transformers{os.sep}")

Place = tuple[str, int]


def line_of(stack_trace: str | None) -> str:
    """`file.py:12`: the innermost frame of the user's own code, else of the library that wrote the model."""
    places = [(path, int(number)) for path, number in FRAME.findall(stack_trace or "")]
    place = _innermost(places)
    return f"{_short(place[0])}:{place[1]}" if place else ""


def failing_line(traceback: TracebackType | None) -> str:
    """`file.py:12: the code`, the innermost line of the user's model that was running when an error came up."""
    places: list[Place] = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    found = [place for place in (_innermost(places, OURS), _innermost(places)) if place]
    lines = [f"{_short(path)}:{number}: {linecache.getline(path, number).strip()}"
             for path, number in dict.fromkeys(found)]
    return ", called from ".join(lines)


def _innermost(places: list[Place], libraries: tuple[str, ...] = LIBRARIES) -> Place | None:
    """The last place outside `libraries`; failing that, outside torch; failing that, the last."""
    for excluded in (libraries, (TORCH,), ()):
        inside = [place for place in places if not any(part in place[0] for part in excluded)]
        if inside:
            return inside[-1]
    return None


def _short(path: str) -> str:
    """Relative to the working directory or site-packages if it is inside, else the bare file name."""
    path = path.split(f"{os.sep}site-packages{os.sep}")[-1]
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if relative.startswith("..") else relative
