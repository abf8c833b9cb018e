"""`verify` on ranks that run already: they have imported what it needs, so that a test takes no seconds for that.

    plan = planned(factory)                 the plan of what the factory builds, on the laptop of the examples
    checked = verified(plan, factory)       as verify(plan, factory), of which test_verify starts ranks too
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks
from shell import LAPTOP

import autoddl
from autoddl.capture.factory import Factory
from autoddl.core.plan import Plan
from autoddl.launch.check import check
from autoddl.launch.verify import Verification, verify

__all__ = ["on_a_rank", "planned", "verified"]


def on_a_rank(file: str) -> None:
    """Does what `autoddl.launch.worker` does with a job of checking."""
    job = json.loads(Path(file).read_text())
    Path(job["folder"], f"result-{dist.get_rank()}.json").write_text(json.dumps(check(job)))


def planned(made: Factory, **options: Any) -> Plan:
    """The plan of what a factory builds, on four ranks of the laptop, with `options` of `autoddl.plan`."""
    model, sample = made.build()
    return autoddl.plan(model, LAPTOP, sample, factory=made.to_json(), **options)


def verified(plan: Plan, factory: Factory, checking: Callable[[str], None] = on_a_rank) -> Verification:
    """What `verify` says of a plan, each of whose ranks does `checking` of its job."""
    def launched(ranks: int, command: Sequence[str], **_: object) -> None:
        on_ranks(ranks, checking, command[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoddl.launch.verify.launch", launched)
        return verify(plan, factory)
