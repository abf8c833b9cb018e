"""Says where the weights W, the gradients G and the optimizer's state O of a parameter are split, axis by axis.

O is the stored layout: what a rank owns, updates and saves. On an axis where it is split, W and G may be split too:

    O      the weight is gathered once a step and kept; the gradient is reduced once a step          (ZeRO-1)
    OG     the gradient is reduced in every microbatch, and only a piece of its sum is kept          (ZeRO-2)
    OGW    the weight is gathered for every forward and again for its backward as well               (ZeRO-3)
    -      O is not split

Axes may differ. With `O OGW` a copy of the weight stays inside a node, and is gathered across nodes once a step: the
secondary copy of ZeRO++. With `-` on the outer axis that is MiCS or HSDP. The two layouts between the stored one and
those of use follow:

    W = O on the axes with W, the layout of use on the others
    G = O on the axes with G, the layout that backward yields on the others
"""

from collections.abc import Sequence

from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout

__all__ = ["DEPTHS", "Depths", "added_layout", "divide_steps", "kept_layout", "parse_depths", "show_depths",
           "summed_layout"]

DEPTHS = ("O", "OG", "OGW")
"""What is split on an axis, by depth: 0, 1, 2."""

Depths = tuple[int, ...]
"""The depth on every axis, 0 where the parameter is not split."""


def show_depths(stored: Layout, depths: Depths) -> str:
    """`OGW O -`: what is split on every axis."""
    return " ".join("-" if state == B else DEPTHS[depth] for state, depth in zip(stored, depths, strict=True))


def parse_depths(text: str) -> Depths:
    """The depths that `show_depths` wrote. Raises InputError for another text."""
    words = text.split()
    if not set(words) <= {*DEPTHS, "-"}:
        raise InputError(f"{text!r} does not say what is split on every axis: {', '.join(DEPTHS)} or -, like 'OGW O'")
    return tuple(DEPTHS.index(word) if word != "-" else 0 for word in words)


def kept_layout(stored: Layout, used: Layout, depths: Depths) -> Layout:
    """W: the layout of the weight that is kept from the first use in a step to the last."""
    return _mixed(stored, used, depths, 2)


def summed_layout(stored: Layout, yielded: Layout, depths: Depths) -> Layout:
    """G: the layout in which the gradients of several microbatches add up."""
    return _mixed(stored, yielded, depths, 1)


def added_layout(stored: Layout, yielded: Layout, summed: Layout, sends: tuple[bool, bool]) -> Layout:
    """The layout in which gradients of microbatches add up on a rank; `sends` tells of the steps to G, and behind it.

    It is G where both send, and the yielded layout where the last alone do. Gradients that nothing is sent of behind a
    microbatch add up as the parameter is stored.
    """
    each, last = sends
    return (summed if each else yielded) if last else stored


def _mixed(stored: Layout, other: Layout, depths: Depths, least: int) -> Layout:
    return Layout(tuple(s if s != B and depth >= least else o
                        for s, o, depth in zip(stored, other, depths, strict=True)))


def divide_steps(steps: Sequence[Step], start: Layout, middle: Layout) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps from `start` to `middle`, and those behind it. Raises InputError where they do not pass it."""
    here = start
    for k in range(len(steps) + 1):
        if here == middle:
            return tuple(steps[:k]), tuple(steps[k:])
        here = steps[k].after(here) if k < len(steps) else here
    raise InputError(f"the steps {', '.join(map(str, steps)) or 'none'} from {start} do not pass {middle}; plan again "
                     "instead of editing the file")
