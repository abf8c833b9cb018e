"""Writes proofs of bounds of pipelines as JSON, and reads them: what a plan file keeps of `pipeline_cuts`.

Of the least seconds of a stage forward and backward are kept; the other terms are 0. Infinite seconds are null.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from autoddl.core.cost_table import Array
from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import CutProblem, CutProof, ListedPlans, PricedStages

__all__ = ["TIME_OVER", "proof_from_json", "proof_to_json"]

TIME_OVER = "the time was over"
"""Why a search of cuts ended that might have found more."""

_PROOF: TypeAdapter[CutProof] = TypeAdapter(CutProof)
_LISTED: TypeAdapter[tuple[ListedPlans, ...]] = TypeAdapter(tuple[ListedPlans, ...])


def proof_to_json(problem: CutProblem, proof: CutProof, places: Sequence[int | None]) -> dict[str, Any]:
    """The proof of a candidate, with the least seconds that it starts from, as JSON; infinite ones are null.

    `places` are the positions of the graph behind 1, 2, .. blocks, null where no stage ends.
    """
    def plain(array: Any) -> Any:
        """Nested lists with null for infinity."""
        if isinstance(array, list):
            return [plain(part) for part in array]
        return array if array < inf else None

    whole = None if problem.whole is None else plain(problem.whole.tolist())
    splits = any(action.kind == "W" for action in problem.schedule)
    return {"schedule": str(problem.schedule), "places": list(places), "transfers": list(problem.transfers),
            "seconds": plain(problem.seconds[:, :, :3 if splits else 2].tolist()), "whole": whole,
            "known": [[list(weights), plain(values.tolist())] for weights, values in problem.known],
            "directions": [[list(weights), plain(values.tolist())] for weights, values in problem.directions],
            "priced": [asdict(one) | {"values": plain(one.values.tolist())} for one in problem.priced],
            "listed": [asdict(one) for one in problem.listed],
            "sent": None if problem.sent is None else _alike(problem.sent),
            "proof": _PROOF.dump_python(proof, mode="json")}


def _alike(sent: Array) -> dict[str, Any]:
    """The rows of transfers, each once, and the number of that of each boundary and place."""
    rows, at = np.unique(sent.reshape(-1, sent.shape[2]), axis=0, return_inverse=True)
    return {"rows": rows.tolist(), "at": at.reshape(sent.shape[:2]).tolist()}


def _ends(places: Sequence[int | None]) -> NDArray[np.bool_] | None:
    """[blocks]: whether a stage may end behind so many, by the places of cuts; None where it may behind all."""
    found = np.array([True, *(place is not None for place in places), True])
    return None if found.all() else found


def _priced(tree: Mapping[str, Any], values: Array) -> PricedStages:
    return PricedStages(tuple(tree["stages"]), tuple(map(tuple, tree["weights"])), tree["price"], tree["budget"],
                        values)


def proof_from_json(tree: Mapping[str, Any]) -> tuple[CutProblem, CutProof]:
    """The question and the proof of a candidate. Raises InputError where the text holds none."""
    def array(lists: Any) -> Any:
        made = np.array(lists, dtype=float)
        return np.where(np.isnan(made), inf, made)

    try:
        known = array(tree["seconds"])
        rest = np.where(np.isfinite(known[:, :, :1]), 0.0, inf)
        seconds = np.concatenate([known, np.repeat(rest, 6 - known.shape[2], axis=2)], axis=2)
        problem = CutProblem(Schedule.parse(tree["schedule"]), seconds, tuple(tree["transfers"]),
                             None if tree["whole"] is None else array(tree["whole"]),
                             tuple((tuple(weights), array(values)) for weights, values in tree["known"]),
                             tuple(_priced(one, array(one["values"])) for one in tree.get("priced", ())),
                             tuple((tuple(weights), array(values)) for weights, values in tree.get("directions", ())),
                             _LISTED.validate_python(tree.get("listed", ())),
                             None if tree.get("sent") is None else array(tree["sent"]["rows"])[tree["sent"]["at"]],
                             _ends(tree["places"]))
        return problem, _PROOF.validate_python(tree["proof"])
    except (KeyError, TypeError, ValueError, IndexError, ValidationError) as error:
        raise InputError(f"the plan's proof cannot be read ({type(error).__name__}): make the plan again") from None
