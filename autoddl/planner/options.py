"""Defines the options of planning: one frozen value, made and checked once.

Python, the shell and a plan's own question all use it. A new option is a field of `PlanOptions`, and the same name in
`Options`, which types the keywords of `autoddl.plan`. The documentation, the shell and the tests read the rest from the
field. The model, the cluster, the sample and the listener of progress are no options.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from math import inf
from typing import Any, ParamSpec, TypedDict, TypeVar, cast

from autoddl.core.codecs import CODECS, checked_codecs, parse_codecs
from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.names import near_names
from autoddl.core.pipeline import sizes_of
from autoddl.core.pipeline_schedules import named_schedule
from autoddl.core.precision import RECIPES, Precision
from autoddl.core.recompute import LIGHT, NO_RECOMPUTE, blocks_of, check_policy
from autoddl.core.sparse import SparseRule
from autoddl.cost_models import Cluster
from autoddl.cost_models.units import with_unit
from autoddl.operators.expert_sizes import BALANCED
from autoddl.pricing.optimizers import OPTIMIZERS, OWN_MOMENTUM, optimizer_of
from autoddl.search import SOLVERS

__all__ = ["Options", "PlanOptions", "documented"]

SHELL_ALONE = ("compiled", "software", "profile")
"""Options of the shell's verbs that change the machine, not the question."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _option(default: Any, help: str, **shell: Any) -> Any:
    """A field with its help text; `shell` is what the command line needs besides (`cli.options`)."""
    return field(default=default, metadata={"help": help, **shell})


class Options(TypedDict, total=False):
    """The keywords of `autoddl.plan`, with the types that a caller may write; `PlanOptions` explains them."""

    mesh: str | None
    mine: str | None
    pins: Sequence[str]
    budget: float | str | None
    optimizer: str
    precision: str
    solver: str
    tolerance: float
    max_axes: int
    time_limit: float | None
    stages_limit: float | None
    workers: int | None
    microbatches: Sequence[int]
    recompute: Sequence[str]
    overlap: bool
    stages: Sequence[int]
    stage_ranks: Sequence[str]
    schedule: Sequence[str]
    cut: Sequence[str]
    compress: Sequence[str]
    error: float | None
    sparse: float | str | None
    expert_load: float
    probe: bool


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Every option of a search for a plan. Raises InputError for a value that no option has."""

    mesh: str | None = _option(None, "only this mesh, like 'dp=4,tp=2'")
    """Text of the one mesh to plan on; None: every mesh that fits the cluster."""

    mine: str | None = _option(None, "your own configuration, like 'tp=8,dp=4,zero=1,sp,recompute=full' (also cp, "
                               "ring, ep, pp, vp, shard)", metavar="DEGREES")
    """Degrees of the only configuration to plan, as text (`core.degrees`); None: every configuration."""

    pins: tuple[str, ...] = _option((), "a layout to choose, like 'h.*.attn.*: node=S(0)'", flag="--pin", metavar="PIN")
    """Constraints on layouts or mesh axes, as text (`pins`)."""

    budget: float | None = _option(None, "bytes a rank may use, like '80 GB' (default: the device's memory)",
                                   written=str)
    """Bytes that one rank may hold, given as a number or as text; None: the memory of the cluster's device."""

    optimizer: str = _option("adamw", f"whose state and update count: {', '.join(OPTIMIZERS)}, or state bytes a "
                             "parameter, like '12 B'")
    """Name of the optimizer whose state and update are priced, or bytes of state per element of a parameter."""

    precision: str = _option("as-written", f"recipe of dtypes: {', '.join(RECIPES)}")
    """Recipe of dtypes in which the model trains, as text (`core.precision`); never the search's to decide."""

    solver: str = _option("exact", f"how to solve: {', '.join(SOLVERS)}")
    """Name of the solver of a mesh's problem; all but `exact` are there to be compared with."""

    tolerance: float = _option(1e-3, "proven gap at which a search under a budget may stop")
    """Part of the plan's seconds that the best plan may save, at least 0 and below 1."""

    max_axes: int = _option(3, "axes of a mesh at most", min=1)
    """Most axes of a mesh."""

    time_limit: float | None = _option(None, "for solving one mesh; the bound tells what is left", metavar="SECONDS")
    """Seconds that solving one mesh may take, soft; None: a fixed effort, the same on every machine."""

    stages_limit: float | None = _option(None, "of the processor, for the search over stages; the bound tells the rest",
                                         metavar="SECONDS")
    """Seconds that the search over stages may take once a plan is found, soft, of the processor and of each of its
    processes, so that other programs hardly change the plan; None: until nothing more is gained."""

    workers: int | None = _option(None, "processes that search (default: chosen automatically)", min=1)
    """Processes that search; their number changes no plan, unless the search over stages has a limit."""

    microbatches: tuple[int, ...] = _option((1,), "parts in which a step may run the batch", metavar="N,N,...",
                                            written=str)
    """Numbers of equal parts in which a step may run the batch, one after the other; rising, each once."""

    recompute: tuple[str, ...] = _option(("none",), "blocks whose forward backward may run again instead of keeping "
                                         "what it saved: none, full, selective (all but products and attention), "
                                         "light (inside of elementwise rows; gathers are made twice), "
                                         "search, every-K, first-N; every-K:selective and so on",
                                         metavar="POLICY,POLICY,...", written=str)
    """Policies of recomputation to choose from, as text (`core.recompute`), each once."""

    overlap: bool = _option(False, "the shortest time line of several plans")
    """Whether the plan is to have the shortest predicted time line instead of the least sum of seconds."""

    stages: tuple[int, ...] = _option((1,), "stages of a pipeline to choose from, each on an equal part of the "
                                      "cluster; 1 is none", metavar="N,N,...", written=str)
    """Numbers of stages of a pipeline to choose from, rising, each once; 1 is a plan without stages."""

    stage_ranks: tuple[str, ...] = _option((), "ranks of every stage, like '1+1+2', where they are not to be equal; "
                                           "any weighs such divisions beside equal ones", metavar="N+N+...,N+...",
                                           written=str)
    """Numbers of ranks of the stages to choose from, as text: `1+1+2`, `even`, or `any` for both kinds."""

    schedule: tuple[str, ...] = _option(("1f1b",), "schedules of a pipeline to choose from: 1f1b, gpipe, "
                                        "interleaved:2, zb-h1, zb-h2, zb-v, dualpipe-v, chimera:1, or a file that has "
                                        "one, as the verb schedule prints it",
                                        metavar="NAME,NAME,...", written=str)
    """Schedules of a pipeline to choose from, as text (`core.pipeline_schedules`), each once."""

    cut: tuple[str, ...] = _option((), "a module with which a stage begins, like 'h.4'", metavar="MODULE")
    """Modules with which stages begin, in order: with n of them all plans have n + 1 stages."""

    compress: tuple[str, ...] = _option((), "messages that may be sent coded, where that is faster, like "
                                        "'gradients=int8,weights=bfloat16/lossless', of gradients, weights, "
                                        f"activations, pipeline; codecs {', '.join(CODECS)}; or hybrid, or lossless",
                                        metavar="MESSAGES=CODEC,...", written=str)
    """Messages that may be coded, as text (`core.codecs`); gradients are then not exact, but for `lossless`."""

    error: float | None = _option(None, "part of the largest value of a block by which coded values may be off, like "
                                  "1e-3; without --compress all messages may be coded so")
    """The most that a coded value may be off, relative to the largest of its block; None: as `compress` says."""

    sparse: str | None = _option(None, "part of a gradient's values that may be sent in a step, the largest, like "
                                 "0.01; the rest is added to the next step's gradient. '0.01,warmup=100,falls=300' "
                                 "adds up whole for 100 steps, and then from 25 % down; momentum=0.9 adds up "
                                 "velocities in place of gradients", metavar="SHARE")
    """How gradients may add up sparse, as text (`core.sparse`), where that is faster; None: whole everywhere."""

    expert_load: float = _option(BALANCED, "rows of the busiest rank over the mean, in layers of experts")
    """The most rows that a rank of split experts multiplies, over the mean, for which seconds and bytes are planned."""

    probe: bool = _option(True, "whether operators without a rule are tried on small pieces, to find dims that split",
                          flag="--probe/--no-probe")
    """Whether operators without a rule are tried on small pieces, so that they may be split where that is right."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", tuple(self.pins))
        object.__setattr__(self, "microbatches", _rising(self.microbatches, "microbatches", "the whole batch"))
        object.__setattr__(self, "stages", _rising(self.stages, "stages", "a plan without stages"))
        object.__setattr__(self, "stage_ranks", _stage_ranks(self.stage_ranks))
        object.__setattr__(self, "schedule", _schedules(self.schedule))
        object.__setattr__(self, "cut", tuple(self.cut))
        object.__setattr__(self, "compress", parse_codecs(self.compress))
        if self.error is not None:
            object.__setattr__(self, "compress", checked_codecs(self.compress, self.error))
        if self.sparse is not None:
            object.__setattr__(self, "sparse", str(SparseRule.parse(self.sparse)))
        if self.mine is not None:
            object.__setattr__(self, "mine", str(Degrees.parse(self.mine)))
        if self.mine is not None and self.mesh is not None:
            raise InputError(f"mesh '{self.mesh}' and mine '{self.mine}' both say how ranks are arranged: give one")
        if self.cut and self.stages not in ((1,), (len(self.cut) + 1,)):
            raise InputError(f"{len(self.cut)} cuts make {len(self.cut) + 1} stages, and stages asks for "
                             f"{', '.join(map(str, self.stages))}: leave it out, or give stages={len(self.cut) + 1}")
        if self.cut:
            object.__setattr__(self, "stages", (len(self.cut) + 1,))
        counts = tuple(sorted({len(sizes) for sizes in map(_stage_sizes, self.stage_ranks) if sizes}))
        if counts and self.stages == (1,) and not self.cut:
            object.__setattr__(self, "stages", counts)
        if counts and self.stages != (1,) and not _are_for(counts, self):
            raise InputError(f"stage ranks {', '.join(self.stage_ranks)} are of {', '.join(map(str, counts))} stages, "
                             f"and stages asks for {', '.join(map(str, self.stages))}: give as many numbers as stages, "
                             "for each number of stages, or add even")
        if self.overlap and self.stages != (1,):
            raise InputError("overlap is about the time lines of plans without stages; a plan with stages is always "
                             "chosen by its time line: leave overlap out")
        object.__setattr__(self, "recompute", _policies(self.recompute))
        optimizer_of(self.optimizer)
        if self.sparse is not None and SparseRule.parse(self.sparse).momentum and self.optimizer in OWN_MOMENTUM:
            raise InputError(f"sparse '{self.sparse}' sums velocities in place of gradients, and optimizer "
                             f"{self.optimizer} has a momentum of its own: take sgd, or leave the momentum out here")
        object.__setattr__(self, "precision", str(Precision.parse(self.precision)))
        if self.solver not in SOLVERS:
            raise InputError(f"there is no solver {self.solver!r}; there are {', '.join(SOLVERS)}")
        if not 1 <= self.expert_load < inf:
            raise InputError(f"an expert load of {self.expert_load} is none: it is the rows of the busiest rank over "
                             "the mean of all, at least 1, like 1.3")
        if not 0 <= self.tolerance < 1:
            raise InputError(f"a tolerance of {self.tolerance} is none: it is the part of a plan's seconds that the "
                             "best may save, at least 0 and below 1, like 0.001")
        if self.stages_limit is not None and not self.stages_limit >= 0:
            raise InputError(f"a limit of {self.stages_limit} seconds is none: the search over stages may take 0 or "
                             "more, like 60; leave it out for no limit")
        if self.budget is not None:
            object.__setattr__(self, "budget", _bytes(self.budget))

    @classmethod
    def of(cls, options: Options) -> "PlanOptions":
        """The options that a caller's keywords say. Raises InputError for an unknown one, and for one that is no tuple.
        """
        known = {one.name: one.default for one in fields(cls)}
        for name, value in options.items():
            if name not in known:
                if name in SHELL_ALONE:
                    raise InputError(f"{name!r} is an option of the shell alone, which says how the machine runs its "
                                     f"programs: `autoddl plan ... --{name} -o plan.json`, then "
                                     "autoddl.load_plan('plan.json')")
                near = near_names(name, known, f"there are {', '.join(known)}", most=1)
                raise InputError(f"there is no option {name!r}; {near}")
            if isinstance(known[name], tuple) and (
                    not isinstance(value, Iterable) or (name == "pins" and isinstance(value, str))):
                raise InputError(f"{name} is {value!r}: give a tuple of what is asked for, like {name}=({value!r},)")
        return cls(**options)  # type: ignore[arg-type]

    def words(self) -> Options:
        """The keywords that say these options."""
        return cast(Options, {one.name: getattr(self, one.name) for one in fields(self)})

    def configured(self) -> "PlanOptions":
        """The options with what `mine` says of recomputation and stages. Raises InputError where others are asked for.
        """
        if self.mine is None:
            return self
        degrees = Degrees.parse(self.mine)
        said = degrees.recompute != NO_RECOMPUTE
        if said and self.recompute not in ((degrees.recompute,), (NO_RECOMPUTE,)):
            raise InputError(f"mine '{self.mine}' recomputes {degrees.recompute}, and recompute asks for "
                             f"{', '.join(self.recompute)}: say it in one of them")
        if self.stages not in ((degrees.pp,), (1,)):
            raise InputError(f"mine '{self.mine}' has {degrees.pp} stages, and stages asks for "
                             f"{', '.join(map(str, self.stages))}: leave stages out, or give pp in mine")
        schedule = self.schedule if degrees.vp == 1 else (f"interleaved:{degrees.vp}",)
        if self.schedule not in (schedule, ("1f1b",)):
            raise InputError(f"mine '{self.mine}' has the schedule {schedule[0]}, and schedule asks for "
                             f"{', '.join(self.schedule)}: leave schedule out, or vp in mine")
        return replace(self, recompute=(degrees.recompute,) if said else self.recompute, stages=(degrees.pp,),
                       schedule=schedule)

    def run_by(self, cluster: Cluster, graph: Graph) -> "PlanOptions":
        """The options for the programs of a cluster: those by hand never keep more than `light` does."""
        keeps_all = self.recompute == (NO_RECOMPUTE,) and blocks_of(graph)
        return replace(self, recompute=(LIGHT,)) if keeps_all and cluster.device.by_hand else self

    @property
    def rings(self) -> bool:
        """Whether degrees or a pin split the length, so that `operators.ring` is tried however short sequences are."""
        return (self.mine is not None and Degrees.parse(self.mine).cp > 1) or any(
            pin.partition("=")[2].strip().removeprefix("expert ").startswith(("ring ", "halves ", "context "))
            for pin in self.pins)

    def limit(self, cluster: Cluster) -> float:
        """Bytes that a rank of `cluster` may hold."""
        return _bytes(cluster.device.memory) if self.budget is None else self.budget


def _bytes(budget: float | str) -> float:
    """A budget as a number. Raises InputError for one of 0 bytes or less."""
    limit = with_unit(budget, "bytes") if isinstance(budget, str) else float(budget)
    if limit <= 0:
        raise InputError(f"a memory budget is above 0 bytes, not {budget}")
    return limit


def _rising(numbers: Sequence[int], what: str, one: str) -> tuple[int, ...]:
    """The numbers to try, each once, rising. Raises InputError for a number below 1, or none; `one` says what 1 is."""
    counts = tuple(sorted(set(numbers)))
    if not counts or counts[0] < 1:
        raise InputError(f"numbers of {what} are at least 1, not {list(numbers)}; 1 is {one}")
    return counts


def _schedules(names: Sequence[str]) -> tuple[str, ...]:
    """The schedules to try, each once; one text names several with commas, and a file has one that a user wrote.

    Raises InputError for an unknown one, and for one that cannot run.
    """
    texts = names.split(",") if isinstance(names, str) else names
    found = tuple(dict.fromkeys(named_schedule(text.strip()) for text in texts))
    if not found:
        raise InputError("a pipeline has some schedule: name one, like '1f1b'")
    return found


def _stage_ranks(given: Sequence[str]) -> tuple[str, ...]:
    """The ranks of stages to choose from, each once; one text names several with commas, an empty one none.

    Raises InputError for others.
    """
    texts = [] if given == "" else given.split(",") if isinstance(given, str) else given
    found = tuple(dict.fromkeys(text.strip() for text in texts))
    for text in found:
        _stage_sizes(text)
    return found


def _are_for(counts: Sequence[int], options: PlanOptions) -> bool:
    """Whether stage ranks for so many stages are for those that are asked for; `even` and `any` are for all others."""
    asked, others = set(options.stages) - {1}, {"even", "any"}.intersection(options.stage_ranks)
    return set(counts) <= asked if others else set(counts) == asked


def _stage_sizes(text: str) -> tuple[int, ...]:
    """The numbers that a text names, none of `any` and `even`."""
    return () if text == "any" else sizes_of(text)


def _policies(recompute: Sequence[str]) -> tuple[str, ...]:
    """The policies of recomputation to try, each once; one text names several with commas between them."""
    texts = recompute.split(",") if isinstance(recompute, str) else recompute
    found = tuple(dict.fromkeys(check_policy(text.strip()) for text in texts))
    if not found:
        raise InputError("a plan recomputes by some policy: name one, like 'none' or 'full'")
    return found


def documented(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Give a function that takes `**options: Unpack[Options]` the signature and the help text of every option."""
    shown, known = inspect.signature(function), Options.__annotations__
    own = [p for p in shown.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    every = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default,
                               annotation=known[one.name]) for one in fields(PlanOptions)]
    rows = "\n".join(f"    {one.name:14}{_said(one)}" for one in fields(PlanOptions))
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n\n{rows}\n"
    function.__signature__ = shown.replace(parameters=[*own, *every])  # type: ignore[attr-defined]
    return function


def _said(one: "Field[Any]") -> str:
    text = str(one.metadata["help"])
    return text if "default" in text or one.default in (None, ()) else f"{text} (default: {one.default})"
