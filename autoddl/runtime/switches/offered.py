"""The switches that a launcher offers to its ranks, and the way of a group through them.

A launcher that has started aggregators writes them into the environment of its ranks, as JSON:

    AUTODDL_SWITCHES   {"token": hex, "levels": [{"name", "ranks", "addresses": [[host, port], ...]}, ...]}

`ranks` are those behind one switch of the level, which are consecutive; levels go from the innermost out. Without it
there are no switches that reduce, and the ranks take other algorithms.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Group
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.switches import blocks_under_way
from autoddl.runtime.switches.aggregator import Address
from autoddl.runtime.switches.frames import Hello, Hop

__all__ = ["SWITCHES", "OfferedLevel", "Switches", "offered_switches", "with_offered"]

SWITCHES = "AUTODDL_SWITCHES"
"""The environment variable."""


@dataclass(frozen=True, slots=True)
class OfferedLevel:
    """The switches of a level: behind each are so many `ranks`, one after the other."""

    name: str
    ranks: int
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches that reduce, by level from the innermost out, and the secret that they ask for."""

    token: bytes
    levels: tuple[OfferedLevel, ...] = ()

    def to_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps({"token": self.token.hex(), "levels": [
            {"name": one.name, "ranks": one.ranks, "addresses": one.addresses} for one in self.levels]})

    def way(self, cluster: Cluster, extents: Group, members: Sequence[int], rank: int, lane: str
            ) -> tuple[Address, Hello]:
        """The first switch of `rank` in the group of `members`, global ranks in order, and what to say there.

        Connections of another `lane` never wait for this one. Raises InputError where a level has no switches.
        """
        by_name = {one.name: one for one in self.levels}
        group = hashlib.sha256(repr((lane, tuple(members))).encode()).digest()[:16]
        behind, first, hops = 1, None, []
        for crossing in crossings(cluster, extents):
            level = by_name.get(crossing.level.name)
            if level is None:
                raise InputError(f"no switches of level {crossing.level.name} are there")
            unit = rank // level.ranks
            children = list(dict.fromkeys(one // behind for one in members if one // level.ranks == unit))
            hops.append(Hop(children.index(rank // behind), len(children), blocks_under_way(crossing)))
            first = first or level.addresses[unit]
            behind = level.ranks
        assert first is not None
        return first, Hello(self.token, group, tuple(hops))


def offered_switches() -> Switches | None:
    """The switches that this process's launcher offers; None where it offers none."""
    text = os.environ.get(SWITCHES)
    if not text:
        return None
    data = json.loads(text)
    return Switches(bytes.fromhex(data["token"]), tuple(
        OfferedLevel(one["name"], one["ranks"], tuple((str(host), int(port)) for host, port in one["addresses"]))
        for one in data["levels"]))


def with_offered(cluster: Cluster, switches: Switches | None) -> Cluster:
    """The cluster, whose levels reduce only where `switches` has them."""
    names = {one.name for one in switches.levels} if switches else set()
    if all(level.reduces is None or level.name in names for level in cluster.levels):
        return cluster
    return replace(cluster, levels=tuple(level if level.name in names else replace(level, reduces=None)
                                         for level in cluster.levels))
