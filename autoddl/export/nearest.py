"""Finds the configuration of a target that is nearest to one, and names what is lost on the way.

Ranks keep their number. Factors are put into the target's order: those that split the batch, then context, then tensor
innermost. Among the roles that the target has, those are taken that change least, in copies of the state:

    distance = sum over factors of log2(size) |how much it splits here - how much there|

How much is 0 for data, 1, 2, 3 for zero-1, 2, 3. Of equal distances the one that splits more takes less memory. Where
a policy of recomputation is none that the target has, several stand in for it, and prices decide among them.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import log2

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.core.precision import Precision
from autoddl.core.recompute import without_light
from autoddl.export.configuration import DATA_ROLES, Configuration, Degree, degrees_of
from autoddl.export.target import Target, TargetLimits

__all__ = ["NearestConfiguration", "is_expressible", "nearest_configuration", "schedule_kind"]


@dataclass(frozen=True, slots=True)
class NearestConfiguration:
    """The nearest configuration of a target.

        configuration    with the first of the policies
        policies         of recomputation among which prices decide
        lost             what the target cannot express, a line each
    """

    configuration: Configuration
    policies: tuple[str, ...]
    lost: tuple[str, ...]


def nearest_configuration(given: Configuration, target: Target) -> NearestConfiguration:
    """The nearest configuration that a target has. Raises InputError where there is none near."""
    limits, lost = target.limits, list[str]()
    found = given
    for change in (_degrees, _pipeline, _words):
        found, more = change(found, target)
        lost += more
    policies: tuple[str, ...] = (without_light(given.recompute),)
    if policies[0] != given.recompute and not target.keeps:
        lost.append(f"recomputation {given.recompute} becomes {policies[0]}: no other program computes insides of "
                    "kernels again")
    if _policy_kind(policies[0], found.stages) not in limits.recompute:
        policies = tuple(one for one in ("none", "selective", "full") if one in limits.recompute)
        words = f"one of {', '.join(policies)}" if len(policies) > 1 else policies[0]
        lost.append(f"recomputation {given.recompute} becomes {words}")
    return NearestConfiguration(replace(found, recompute=policies[0]), policies, tuple(lost))


def is_expressible(given: Configuration, target: Target) -> bool:
    """Whether a target has just this configuration."""
    try:
        found = nearest_configuration(given, target)
    except InputError:
        return False
    return found.configuration == given and found.policies == (given.recompute,)


def _degrees(given: Configuration, target: Target) -> tuple[Configuration, list[str]]:
    """The factors in the target's order, with roles that it has."""
    limits, lost = target.limits, list[str]()
    parts = sorted(given.degrees, key=lambda one: ("context", "tensor").index(one.role) + 1
                   if one.role not in DATA_ROLES else 0)
    if degrees_of(parts) != given.degrees:
        lost.append(f"the order of axes {_grid(given.degrees)}: {target.title} has {_grid(degrees_of(parts))}, so "
                    "groups of ranks cross other links")
    for one in parts:
        if one.role == "context" and not limits.context:
            raise InputError(f"{target.title} has no context parallelism, and the plan has {one}: plan without it, "
                             "like with --pin AXIS=zero-3")
    data = [one for one in parts if one.role in DATA_ROLES]
    others = [one for one in parts if one.role not in DATA_ROLES]
    roles = _roles(data, _allowed(limits, bool(others)), target)
    lost += [f"{one.size} ranks that are {one.role} become {role}" for one, role in zip(data, roles, strict=True)
             if one.role != role]
    if given.experts > 1 and not limits.experts:
        raise InputError(f"{target.title} has no expert parallelism, and the plan splits experts over {given.experts} "
                         "ranks: plan with experts whole")
    found = degrees_of([*(Degree(role, one.size) for one, role in zip(data, roles, strict=True)), *others])
    sequence = given.sequence if given.sequence in limits.sequence else limits.sequence[0]
    sequence = sequence and any(one.role == "tensor" for one in found)
    if sequence != given.sequence:
        lost.append(f"the sequence is {'split' if given.sequence else 'whole'} over ranks of tensor parallelism "
                    f"between products, and {'split' if sequence else 'whole'} here")
    return replace(given, degrees=found, sequence=sequence), lost


def _allowed(limits: TargetLimits, others: bool) -> list[tuple[str, ...]]:
    """The sequences of roles of ranks that split the batch, beside others or alone."""
    return sorted(limits.data if limits.beside is None or not others else limits.beside)


def _roles(data: list[Degree], allowed: list[tuple[str, ...]], target: Target) -> tuple[str, ...]:
    """The roles of the factors that split the batch, the nearest that a target has."""
    def distance(roles: tuple[str, ...]) -> tuple[float, int]:
        ranks = [DATA_ROLES.index(role) for role in roles]
        own = [DATA_ROLES.index(one.role) for one in data]
        return (sum(log2(one.size) * abs(a - b) for one, a, b in zip(data, own, ranks, strict=True)), -sum(ranks))

    fine = [roles for roles in product(DATA_ROLES, repeat=len(data))
            if tuple(one.role for one in degrees_of(Degree(role, 2) for role in roles)) in allowed]
    if not fine:
        raise InputError(f"{target.title} cannot split the batch over {_grid(tuple(data))} ranks: plan with fewer axes")
    return min(fine, key=distance)


def _grid(degrees: tuple[Degree, ...]) -> str:
    return " ".join(map(str, degrees)) or "one rank"


def schedule_kind(name: str) -> str:
    """The kind of a schedule, without its number: `interleaved` of `interleaved:2`."""
    return name.partition(":")[0]


def _pipeline(given: Configuration, target: Target) -> tuple[Configuration, list[str]]:
    """The stages and the schedule."""
    if given.stages == 1:
        return given, []
    limits, lost = target.limits, list[str]()
    if not limits.stages:
        raise InputError(f"{target.title} has no pipelines, and the plan has {given.stages} stages: plan with --stages "
                         "1, or export to torchtitan or megatron")
    found = given
    if schedule_kind(given.schedule) not in limits.schedules:
        chunks = given.all_stages // given.stages
        name = f"interleaved:{chunks}" if chunks > 1 and "interleaved" in limits.schedules else "1f1b"
        if chunks > 1 and given.microbatches % given.stages:
            name = "1f1b"
        layers = given.layers if chunks == 1 or name != "1f1b" else ()
        found = replace(found, schedule=name, layers=layers)
        lost.append(f"schedule {schedule_title(given.schedule)} becomes {name}")
    if found.layers and not limits.layers:
        lost.append(f"stages of {'+'.join(map(str, found.layers))} blocks become stages of equally many")
        found = replace(found, layers=())
    return found, lost


def _words(given: Configuration, target: Target) -> tuple[Configuration, list[str]]:
    """The precision, which no search can change: the plan's graph has it."""
    name = Precision.parse(given.precision).name
    if given.precision not in target.limits.precisions:
        likely = "bf16-mixed" if name != "float32" else "float32"
        raise InputError(f"{target.title} has no precision {given.precision}; it has "
                         f"{', '.join(target.limits.precisions)}: plan with --precision {likely}")
    return given, []


def _policy_kind(policy: str, stages: int) -> str:
    """The kind of a policy: none, full, selective, first, every, or names. In stages, counts mean other blocks."""
    word, _, level = policy.partition(":")
    kind = word.partition("-")[0]
    if kind not in ("none", "full", "selective", "first", "every") or (stages > 1 and kind in ("first", "every")):
        return "names"
    return kind if not level else f"{kind}:{level}"
