"""The question that a measuring rank is asked, and the origin of its answer: date, versions, device."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autoddl.cost_models import Cluster

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The question that all ranks of a measurement are asked."""

    text: str
    """The cluster file without its block `measured:`."""
    source: str
    """The path of the cluster file, for error messages."""
    seconds: float
    """Seconds that measuring may take."""
    threads: int = 1
    """Threads of a rank."""
    ranks: int = 1
    """The number of ranks."""
    here: int = 1
    """The number of ranks on this machine."""
    shaped: bool = False
    """Whether the ranks are on shaped links."""
    small: bool = False
    """Whether the grids are small, for tests."""


def origin(cluster: Cluster, request: Request, processor: str, versions: Mapping[str, str], load: float
           ) -> dict[str, Any]:
    """Returns date, versions and device of a measurement."""
    return {"date": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "versions": {"python": platform.python_version(), **versions},
            "device": {"name": cluster.device.name, "kind": cluster.device.kind, "processor": processor,
                       "threads": request.threads, "ranks": request.ranks, "load": round(load, 2)}}
