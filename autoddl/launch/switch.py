"""The program of a switch that reduces: `python -m autoddl.launch.switch`, in the switch's own network namespace.

It reads one line of JSON, {"host", "token", "memory", "above"}, listens on that host alone, and answers with its port.
It ends when its input does, or its parent.
"""

import json
import sys
from math import inf

from autoddl.runtime.switches.aggregator import Aggregator

__all__ = ["main"]


def main() -> None:
    """Serves until the launcher closes the input."""
    asked = json.loads(sys.stdin.readline())
    above = (str(asked["above"][0]), int(asked["above"][1])) if asked["above"] else None
    memory = inf if asked["memory"] is None else float(asked["memory"])
    switch = Aggregator(asked["host"], bytes.fromhex(asked["token"]), memory, above)
    print(json.dumps(switch.address), flush=True)
    switch.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
