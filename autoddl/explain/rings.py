"""Says in words over which mesh axes keys of attention go round or queries are traded, and places of images are split.
"""

from collections import Counter

from autoddl.core.layout import Layout, Split
from autoddl.core.plan import Decision, Plan
from autoddl.operators.ring import ROUND
from autoddl.operators.windows import WINDOWED

__all__ = ["places_text", "ring_text"]

_OTHERS = {Split(0): "the batch", Split(1): "heads"}


_PLACES = {"1d": ("length",), "2d": ("height", "width"), "3d": ("depth", "height", "width")}
"""Names of the dims behind batch and channels, by what an operator's name ends with."""


def places_text(plan: Plan) -> str:
    """Says which places of images convolutions split; empty where they split none."""
    found = Counter(split for one in plan.decisions if one.target in WINDOWED and "conv" in one.target
                    and (split := _split_places(plan, one)))
    return "; ".join(f"{split} in {count} convolution{'s' * (count > 1)}" for split, count in found.items())


def _split_places(plan: Plan, one: Decision) -> str:
    names = _PLACES.get(one.target.split(".")[1][-2:], ())
    axes = [(name, [axis.name for axis, state in zip(plan.mesh.axes, one.inputs[0], strict=True)
                    if state == Split(2 + dim)]) for dim, name in enumerate(names)]
    return " and ".join(f"{name} over {'+'.join(over)}" for name, over in axes if over)


def ring_text(plan: Plan) -> str:
    """Says what is split of attention whose keys go round, or whose ranks trade queries; empty where neither is."""
    every = [one for one in plan.decisions if one.target in ROUND]
    found = Counter((one.inputs[0], one.inner) for one in every if one.inner or _goes_round(one))
    return "; ".join(f"of {count} operator{'s' * (count > 1)} {_said(plan, *said)}" for said, count in found.items())


def _goes_round(one: Decision) -> bool:
    return Split(2) in one.inputs[1].states


def _said(plan: Plan, queries: Layout, gathered: bool) -> str:
    ring = [axis for axis, state in zip(plan.mesh.axes, queries, strict=True) if state == Split(2)]
    ranks = 1
    for axis in ring:
        ranks *= axis.size
    others = [f"{_OTHERS[state]} split over {axis.name}" for axis, state in zip(plan.mesh.axes, queries, strict=True)
              if state in _OTHERS and axis.size > 1]
    names = "+".join(axis.name for axis in ring)
    what = "halves of the queries are traded, so that work is even, among" if gathered else \
        "keys and values go round a ring of"
    return ", ".join([f"{what} {ranks} ranks over {names}", *others])
