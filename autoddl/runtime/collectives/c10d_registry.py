"""Finds process groups that torch has already: reads the private registry of torch.distributed (torch 2.13).

Torch has no public way to ask for a group by its description, or to change the timeout of one. These private names are
used, and a test notices when one of them is gone:

    distributed_c10d._world.pg_map          the groups of this process, each with its `group_desc`
    distributed_c10d._set_pg_timeout        the timeout of a group that exists
"""

from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["find_group", "set_group_timeout"]


def find_group(description: str) -> dist.ProcessGroup | None:
    """The first group of this process with this description, None if there is none."""
    return next((group for group in c10d._world.pg_map if group.group_desc == description), None)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of the collectives of a group that exists."""
    c10d._set_pg_timeout(timeout, group)
