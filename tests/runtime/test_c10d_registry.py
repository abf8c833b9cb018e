"""The private names of torch.distributed that the runtime reads are there, and mean what it takes them for."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from autoddl.runtime.collectives.c10d_registry import find_group, set_group_timeout


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_group_is_found_by_its_description() -> None:
    made = dist.new_group([0], group_desc="autoddl 2x1")
    assert find_group("autoddl 2x1") is made
    assert find_group("autoddl 4x1") is None


@pytest.mark.usefixtures("world")
def test_the_timeout_of_a_group_is_set() -> None:
    made = dist.new_group([0], timeout=timedelta(seconds=60))
    set_group_timeout(made, timedelta(seconds=7))
    options = made._get_backend(next(iter(made._device_types))).options
    assert options._timeout == timedelta(seconds=7)
