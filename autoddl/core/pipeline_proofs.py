"""Writes proofs of bounds of pipelines as JSON, and reads them: what a plan file keeps of `pipeline_cuts`.

The cuts of a candidate may be in several *windows*: of each boundary a window has the least and the most blocks before
it. Every window has a proof of its own, from the least seconds of stages that lie in it. Tables have only the numbers
of blocks that a stage can have there, by `sizes`; elsewhere they are infinite. Each row is the number of one of the
candidate's `rows`: windows have many in common. Of the least seconds forward and backward are kept; the others are 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from autoddl.core.cost_table import Array
from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import CutProblem, CutProof, ListedPlans, PricedStages

__all__ = ["TIME_OVER", "Window", "WindowProof", "ends_in", "proofs_from_json", "proofs_to_json"]

TIME_OVER = "the time was over"
"""Why a search of cuts ended that might have found more."""

Window = tuple[tuple[int, int], ...]
"""For each boundary the least and the most blocks before it; none: they may lie anywhere."""

_PROOF: TypeAdapter[CutProof] = TypeAdapter(CutProof)
_LISTED: TypeAdapter[tuple[ListedPlans, ...]] = TypeAdapter(tuple[ListedPlans, ...])


class WindowProof(NamedTuple):
    """The proof of the cuts of a window, from the least seconds of stages there."""

    window: Window
    problem: CutProblem
    proof: CutProof


def proofs_to_json(proofs: Sequence[WindowProof], places: Sequence[int | None]) -> dict[str, Any]:
    """The proofs of a candidate, with the least seconds that they start from, as JSON.

    `places` are the positions of the graph behind 1, 2, .. blocks, null where no stage ends.
    """
    problem, rows = proofs[0].problem, dict[bytes, tuple[int, list[Any]]]()
    windows = [_to_json(one, rows) for one in proofs]
    return {"schedule": str(problem.schedule), "places": list(places), "transfers": list(problem.transfers),
            "sent": None if problem.sent is None else _alike(problem.sent), "rows": [row for _, row in rows.values()],
            "windows": windows}


def _to_json(one: WindowProof, rows: dict[bytes, tuple[int, list[Any]]]) -> dict[str, Any]:
    """The proof of a window; adds to the rows of the candidate, by what they hold."""
    window, problem, proof = one
    possible: NDArray[np.bool_] = np.isfinite(problem.seconds[:, :, 0])
    sizes = [np.flatnonzero(row) for row in possible]

    def told(values: Array, stages: Iterable[int] = range(len(sizes))) -> list[int]:
        """By stage, the row of the values of the sizes that it can have."""
        own = [np.ascontiguousarray(row[sizes[s]]) for s, row in zip(stages, values, strict=True)]
        return [rows.setdefault(row.tobytes() + bytes([row.ndim]), (len(rows), row.tolist()))[0] for row in own]

    splits = any(action.kind == "W" for action in problem.schedule)
    return {"window": [list(ends) for ends in window], "sizes": [(own + 1).tolist() for own in sizes],
            "seconds": told(problem.seconds[:, :, :3 if splits else 2]),
            "whole": None if problem.whole is None else told(problem.whole),
            "known": [[list(weights), told(values)] for weights, values in problem.known],
            "directions": [[list(weights), told(values)] for weights, values in problem.directions],
            "priced": [asdict(one) | {"values": told(one.values, one.stages)} for one in problem.priced],
            "listed": [asdict(one) for one in problem.listed],
            "proof": _PROOF.dump_python(proof, mode="json")}


def _alike(sent: Array) -> dict[str, Any]:
    """The rows of transfers, each once, and the number of that of each boundary and place."""
    rows, at = np.unique(sent.reshape(-1, sent.shape[2]), axis=0, return_inverse=True)
    return {"rows": rows.tolist(), "at": at.reshape(sent.shape[:2]).tolist()}


def ends_in(real: NDArray[np.bool_], window: Window, stages: int) -> NDArray[np.bool_] | None:
    """[stage, blocks]: whether it may end behind so many, by the places where any may, [blocks], and the window.

    None where it may behind all.
    """
    found = np.repeat(real[None], stages, axis=0)
    for row, (least, most) in zip(found, window, strict=False):
        row[:least] = row[most + 1:] = False
    return None if found.all() else found


def _priced(tree: Mapping[str, Any], values: Array) -> PricedStages:
    return PricedStages(tuple(tree["stages"]), tuple(map(tuple, tree["weights"])), tree["price"], tree["budget"],
                        values)


def proofs_from_json(tree: Mapping[str, Any]) -> tuple[WindowProof, ...]:
    """The proofs of a candidate. Raises InputError where the text holds none."""
    try:
        schedule, transfers = Schedule.parse(tree["schedule"]), tuple(map(float, tree["transfers"]))
        sent = None if tree.get("sent") is None else np.array(tree["sent"]["rows"])[tree["sent"]["at"]]
        real = np.array([True, *(place is not None for place in tree["places"]), True])
        _check(len(tree["windows"]) > 0 and len(transfers) == schedule.stages - 1)
        terms = 3 if any(action.kind == "W" for action in schedule) else 2
        found = []
        for one in tree["windows"]:
            window = _window(one["window"], schedule.stages, len(real) - 1)
            read = partial(_read, tree["rows"], _sizes(one["sizes"], schedule.stages, len(real) - 1), len(real) - 1)
            problem = CutProblem(
                schedule, read(one["seconds"], terms), transfers, None if one["whole"] is None else read(one["whole"]),
                tuple((tuple(weights), read(values)) for weights, values in one["known"]),
                tuple(_priced(price, read(price["values"], 0, price["stages"], 0.0)) for price in one["priced"]),
                tuple((tuple(weights), read(values)) for weights, values in one["directions"]),
                _LISTED.validate_python(one["listed"]), sent, ends_in(real, window, schedule.stages))
            found.append(WindowProof(window, problem, _PROOF.validate_python(one["proof"])))
        return tuple(found)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, ValidationError) as error:
        raise InputError(f"the plan's proof cannot be read ({type(error).__name__}): make the plan again") from None


def _check(is_so: bool) -> None:
    """Raises ValueError unless it is so: a file that says otherwise holds no proof."""
    if not is_so:
        raise ValueError("a proof of another form")


def _window(ends: Sequence[Sequence[int]], stages: int, blocks: int) -> Window:
    """The window: of each boundary whole numbers of blocks, the least first; or none at all."""
    found = tuple((int(least), int(most)) for least, most in ends)
    _check(len(found) in (0, stages - 1) and all(0 <= least <= most <= blocks for least, most in found))
    return found


def _sizes(sizes: Sequence[Sequence[int]], stages: int, blocks: int) -> list[NDArray[np.intp]]:
    """By stage, the numbers of blocks that it can have, in order."""
    found = [np.array(own, dtype=np.intp) for own in sizes]
    _check(len(found) == stages and all((np.diff([0, *own, blocks + 1]) > 0).all() for own in found))
    return found


def _read(rows: Sequence[Sequence[Any]], sizes: Sequence[NDArray[np.intp]], blocks: int, numbers: Sequence[int],
          terms: int = 0, stages: Sequence[int] | None = None, elsewhere: float = inf) -> Array:
    """[stage, blocks - 1], or with so many terms [stage, blocks - 1, term]: the rows of the sizes that stages can have.

    Terms that rows have not are 0.
    """
    found = np.full((len(numbers), blocks, *((6,) if terms else ())), elsewhere)
    every = range(len(sizes)) if stages is None else stages
    _check(len(every) == len(numbers) and min(numbers, default=0) >= 0 and min(every, default=0) >= 0)
    for s, number, own in zip(every, numbers, found, strict=True):
        values = np.array(rows[number], dtype=float).reshape(len(sizes[s]), *((terms,) if terms else ()))
        own[sizes[s] - 1] = np.pad(values, ((0, 0), (0, 6 - terms))) if terms else values
    return found
