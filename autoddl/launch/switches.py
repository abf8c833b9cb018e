"""Starts the switches of a shaped network that reduce, each as a process in its switch's namespace.

The outermost are started first, because those inside pass their sums on to them. Each listens on the address of its own
bridge. A secret that is made here goes to them and to the ranks, so that nobody else is served.
"""

import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite

from autoddl.core.errors import MachineError
from autoddl.core.processes import die_with_parent
from autoddl.cost_models import Cluster
from autoddl.launch.launch import python_module
from autoddl.launch.shaped_network import ShapedNetwork, SwitchPlace
from autoddl.runtime.switches.aggregator import Address
from autoddl.runtime.switches.frames import TOKEN_BYTES
from autoddl.runtime.switches.offered import OfferedLevel, Switches

__all__ = ["start_switches"]

START_SECONDS = 60.0
"""Seconds that a switch may take to say where it listens."""


@contextmanager
def start_switches(cluster: Cluster, built: ShapedNetwork) -> Iterator[Switches | None]:
    """Starts a process for every switch of a level that reduces, and ends them all afterwards.

    Yields None where no level reduces. Raises MachineError where one does not start.
    """
    reducing = {level.name: level.reduces for level in cluster.levels if level.reduces is not None}
    token, found, outer = secrets.token_bytes(TOKEN_BYTES), list[OfferedLevel](), list[tuple[SwitchPlace, Address]]()
    with ExitStack() as running:
        for name in reversed([level.name for level in cluster.levels]):
            places = [one for one in built.reducing if one.level == name]
            if not places:
                continue
            addresses = []
            for place in places:
                above = next((address for upper, address in outer if upper.first <= place.first < upper.first
                              + upper.ranks), None)
                switch = reducing[name]
                memory = switch.memory if isfinite(switch.memory) else None
                addresses.append(running.enter_context(_started(place, token, memory, above)))
            outer = list(zip(places, addresses, strict=True))
            found.insert(0, OfferedLevel(name, places[0].ranks, tuple(addresses)))
        yield Switches(token, tuple(found)) if found else None


@contextmanager
def _started(place: SwitchPlace, token: bytes, memory: float | None, above: Address | None) -> Iterator[Address]:
    """One process; yields where it listens."""
    command: Sequence[str] = ("ip", "netns", "exec", place.namespace, *python_module("autoddl.launch.switch"))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               preexec_fn=die_with_parent)
    try:
        assert process.stdin is not None and process.stdout is not None
        asked = {"host": place.address, "token": token.hex(), "memory": memory, "above": above}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise MachineError(f"the switch of level {place.level} at {place.address} did not start; its own message "
                               "says why. Rehearse without shaping: rehearse --loopback")
        host, port = json.loads(line)
        yield str(host), int(port)
    finally:
        process.kill()
        process.communicate()
