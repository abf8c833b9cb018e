"""A configuration of training as other trainers know it: degrees of parallelism, and a few words.

The ranks of a stage are a grid, outermost first, like `data=4 zero-3=8 tensor=2`. Each factor has a role:

    data       ranks split the batch, and each holds everything
    zero-1     ranks split the batch and the optimizer's state
    zero-2     and the sums of gradients too
    zero-3     and the weights too
    context    ranks split the sequence, and hold everything, or their piece where zero-2 or zero-3 surrounds them
    tensor     ranks split products, and the parameters that they read

    ranks        = stages * product of all degrees
    global batch = microbatch * microbatches * product of the degrees of data and zero

A configuration says less than a plan, which has a layout for every op.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import chunks_of, schedule_title
from autoddl.core.precision import Precision
from autoddl.core.recompute import check_policy

__all__ = ["DATA_ROLES", "ROLES", "Configuration", "Degree", "degrees_of"]

DATA_ROLES = ("data", "zero-1", "zero-2", "zero-3")
"""Roles of ranks that split the batch, by how much else they split."""

ROLES = (*DATA_ROLES, "context", "tensor")


@dataclass(frozen=True, slots=True)
class Degree:
    """A factor of the ranks of a stage: `size` of them have one role. Raises InputError for an unknown role."""

    role: str
    size: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InputError(f"there is no role {self.role!r}; there are {', '.join(ROLES)}")
        if self.size < 1:
            raise InputError(f"a degree is at least 1, not {self.role}={self.size}")

    def __str__(self) -> str:
        return f"{self.role}={self.size}"


def degrees_of(given: Iterable[Degree]) -> tuple[Degree, ...]:
    """The degrees without those of one rank, and neighbours with one role as one."""
    large = [one for one in given if one.size > 1]
    return tuple(Degree(role, prod(one.size for one in group)) for role, group in groupby(large, lambda one: one.role))


@dataclass(frozen=True, slots=True)
class Configuration:
    """Degrees of parallelism and what else a trainer is told. Raises InputError for values that contradict each other.

        degrees        roles of the ranks of a stage, outermost first (`degrees_of`)
        microbatch     rows of a microbatch on one rank
        microbatches   of a step, one after the other
        stages         parts of the cluster along a pipeline; 1 without one
        schedule       of the pipeline (`core.pipeline_schedules`); 1f1b without one
        layers         blocks of every stage in order, several stages a part where the schedule says so; () for equally
                       many
        sequence       whether what lies between products is split by the sequence over the ranks of `tensor`
        experts        ranks over which the experts of a layer are split, of those that split the batch
        precision      recipe of dtypes (`core.precision`)
        recompute      policy of recomputation (`core.recompute`)
    """

    degrees: tuple[Degree, ...] = ()
    microbatch: int = 1
    microbatches: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    layers: tuple[int, ...] = ()
    sequence: bool = False
    experts: int = 1
    precision: str = "float32"
    recompute: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", degrees_of(self.degrees))
        if len(set(self.layers)) == 1:
            object.__setattr__(self, "layers", ())
        for name in ("microbatch", "microbatches", "stages", "experts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.layers and (len(self.layers) % self.stages or self.stages == 1):
            raise InputError(f"layers are given for {len(self.layers)} stages, which {self.stages} parts of a pipeline "
                             "do not share evenly")
        if self.sequence and self.degree("tensor") == 1:
            raise InputError("the sequence is split over the ranks of tensor parallelism, and there are none: leave it "
                             "out, or give a tensor degree above 1")
        Precision.parse(self.precision)
        check_policy(self.recompute)
        chunks_of(self.schedule)

    def degree(self, *roles: str) -> int:
        """The ranks of a stage with any of these roles."""
        return prod(one.size for one in self.degrees if one.role in roles)

    @property
    def data(self) -> int:
        """Ranks of a stage over which the batch is split."""
        return self.degree(*DATA_ROLES)

    @property
    def all_stages(self) -> int:
        """Stages on all parts together, of which a schedule may have several on each."""
        return self.stages * chunks_of(self.schedule)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stages * prod(one.size for one in self.degrees)

    @property
    def rows(self) -> int:
        """Rows of the batch of a step, on all ranks together."""
        return self.microbatch * self.microbatches * self.data

    def __str__(self) -> str:
        """One line: `data=4 tensor=8, 32 microbatches of 1 row, 8 stages by 1f1b, bf16-mixed, recompute none`."""
        grid = " ".join(map(str, self.degrees)) or "one rank"
        parts = [grid + (f" stages={self.stages}" if self.stages > 1 else ""),
                 f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)} of {self.microbatch} "
                 f"row{'s' * (self.microbatch > 1)} a rank"]
        if self.stages > 1:
            cut = f" of {'+'.join(map(str, self.layers))} blocks" if self.layers else ""
            parts.append(f"schedule {schedule_title(self.schedule)}{cut}")
        if self.sequence:
            parts.append("sequence parallel")
        if self.experts > 1:
            parts.append(f"experts over {self.experts} ranks")
        return ", ".join((*parts, self.precision, f"recompute {self.recompute}"))

    def to_json(self) -> Mapping[str, Any]:
        """The fields by name, degrees as [role, size]."""
        return {"degrees": [[one.role, one.size] for one in self.degrees], "microbatch": self.microbatch,
                "microbatches": self.microbatches, "stages": self.stages, "schedule": self.schedule,
                "layers": list(self.layers), "sequence": self.sequence, "experts": self.experts,
                "precision": self.precision, "recompute": self.recompute}
