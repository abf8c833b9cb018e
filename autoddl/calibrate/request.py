"""What a rank that measures is asked, and where and when it measured."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autoddl.cost_models import Cluster

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is measured: `text` of the cluster file without what was measured before; `here` ranks of all are on this
    machine, on links that are `shaped` or not; `small` grids are for tests."""

    text: str
    source: str
    seconds: float
    threads: int = 1
    ranks: int = 1
    here: int = 1
    shaped: bool = False
    small: bool = False


def origin(cluster: Cluster, request: Request, processor: str, versions: Mapping[str, str], load: float
           ) -> dict[str, Any]:
    """Date, versions and device of a measurement."""
    return {"date": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "versions": {"python": platform.python_version(), **versions},
            "device": {"name": cluster.device.name, "kind": cluster.device.kind, "processor": processor,
                       "threads": request.threads, "ranks": request.ranks, "load": round(load, 2)}}
