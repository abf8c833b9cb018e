"""Seconds of an all-reduce in switches that add up what is pushed to them, as SHARP's and Flare's do.

A rank sends its N bytes once, in blocks of B bytes, and gets the sum once. A switch adds the same block of all its
children, in their order, and passes the sum to the switch above. The sums of the outermost level go down again.

    switch tree   = sum 2 (a_i + t_i(B)) + max_i t_i(N - B)
    t_i(v)        = max( wire_i(rings_i v),  w_i g_i v / rate_i,  2 (a_i + wire_i(rings_i B)) v / (W_i B) )
    W_i           = min(MOST_BLOCKS, memory_i / (w_i g_i B))          blocks of each child that are under way

The symbols are those of `algorithms`. g_i groups of the form have members in one unit of level i, and rate_i is of the
switch. B is that of the level, or N where that is less. The three bounds are those of the link, of the adder, and of
the memory. The last is Little's law: a block keeps its room until its sum has left.

A switch has room if LEAST_BLOCKS blocks of each child are: one that arrives while another leaves. Else, and where a
level that is crossed does not reduce, the group falls back to other algorithms (`why_not`).

A reduce-scatter, an all-gather or a broadcast gains nothing: one direction of a link carries N bytes in any case.

Sources: Graham et al., "Scalable Hierarchical Aggregation Protocol (SHArP)", COM-HPC 2016; De Sensi et al., "Flare:
Flexible In-Network Allreduce", SC 2021.
"""

from collections.abc import Sequence
from math import inf

from autoddl.cost_models.call import CollectiveCall
from autoddl.cost_models.groups import Crossing
from autoddl.cost_models.units import show_bytes

__all__ = ["LEAST_BLOCKS", "MOST_BLOCKS", "blocks_under_way", "switch_tree", "why_not"]

LEAST_BLOCKS = 2
"""Blocks of a child for which a switch needs room: one arrives while the sum of another leaves."""
MOST_BLOCKS = 32
"""Blocks of a child that are under way at most, however much memory there is."""


def blocks_under_way(crossing: Crossing) -> int:
    """W: the blocks of each child that a switch of the level holds at once; 0 where it does not reduce."""
    switch = crossing.level.reduces
    if switch is None:
        return 0
    return int(min(MOST_BLOCKS, switch.memory / (crossing.ways * crossing.groups * switch.block)))


def why_not(crossed: Sequence[Crossing]) -> str:
    """Says in words why the switches of these levels do not add up a group's blocks; empty where they do."""
    for crossing in crossed:
        level, blocks = crossing.level, blocks_under_way(crossing)
        if level.reduces is None:
            return f"the switches of level {level.name} do not reduce"
        if blocks < LEAST_BLOCKS:
            children = crossing.ways * crossing.groups
            needed = LEAST_BLOCKS * level.reduces.block * children
            return (f"a switch of level {level.name} has {show_bytes(level.reduces.memory)} for blocks, and "
                    f"{LEAST_BLOCKS} of {show_bytes(level.reduces.block)} from {children} children take "
                    f"{show_bytes(needed)}")
    return ""


def switch_tree(call: CollectiveCall) -> float:
    """sum 2 (a_i + t_i(B)) + max_i t_i(N - B); inf for other collectives, and where a switch does not take part."""
    if call.kind != "all-reduce" or why_not(call.crossings):
        return inf
    blocks = {crossing: min(_block(crossing), call.nbytes) for crossing in call.crossings}
    filling = sum(2 * (call.latency(c) + _seconds(call, c, block)) for c, block in blocks.items())
    return filling + max(_seconds(call, c, call.nbytes - block) for c, block in blocks.items())


def _block(crossing: Crossing) -> float:
    assert crossing.level.reduces is not None
    return crossing.level.reduces.block


def _seconds(call: CollectiveCall, crossing: Crossing, nbytes: float) -> float:
    """t_i: seconds in which the sums of `nbytes` pass a switch of the level."""
    switch, rings = crossing.level.reduces, call.rings(crossing)
    assert switch is not None
    stays = 2 * (call.latency(crossing) + call.seconds(crossing, rings * switch.block))
    return max(call.seconds(crossing, rings * nbytes), crossing.ways * crossing.groups * nbytes / switch.rate,
               stays * nbytes / (blocks_under_way(crossing) * switch.block))
