"""A plan: everything that planning decided and running needs, as JSON.

    decisions      the layouts in which each op reads and writes
    conversions    the steps on every edge where a layout changes
    stored         the part of each parameter that a rank owns

A tensor with several consumers passes through a *hub* (`hubs`). Hubs stand among the decisions; their `gradient` is the
layout in which the consumers' gradients add up.

A plan is data: reading one runs no code that it names.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from pydantic.dataclasses import rebuild_dataclass

from autoddl.core.conversion import Step, is_conversion
from autoddl.core.errors import InputError
from autoddl.core.files import write_atomically
from autoddl.core.layout import Layout, Mesh
from autoddl.core.names import is_factory
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import schedule_title, written_numbers
from autoddl.core.precision import Precision
from autoddl.core.problem import EXACT
from autoddl.core.sparse import SparseRule
from autoddl.core.state_layouts import Depths, parse_depths

__all__ = ["BUCKET_BYTES", "VERSION", "Conversion", "Decision", "Pipeline", "Plan", "PlanIndex", "Prediction", "Stage",
           "StageBytes", "Stored", "level_of", "load_plan", "parse_plan"]

VERSION = 2
BUCKET_BYTES = 25 * 2**20


def _read_layout(value: object) -> object:
    return Layout.parse(value) if isinstance(value, str) else value


def _read_mesh(value: object) -> object:
    return Mesh.parse(value) if isinstance(value, str) else value


LayoutText = Annotated[Layout, BeforeValidator(_read_layout), PlainSerializer(str)]
MeshText = Annotated[Mesh, BeforeValidator(_read_mesh), PlainSerializer(str)]
_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@checked(frozen=True, slots=True, config=_STRICT)
class Decision:
    """The layouts in which op `name` reads its inputs, one per slot, and writes its outputs. Hubs have a `gradient`.

    `inner` says that its kernel communicates, where layouts do not tell."""

    name: str
    target: str
    inputs: tuple[LayoutText, ...]
    outputs: tuple[LayoutText, ...]
    gradient: LayoutText | None = None
    inner: bool = False


@checked(frozen=True, slots=True, config=_STRICT)
class Conversion:
    """The steps on one edge of the graph: of the tensor forward, and of its gradient backward.

        op         the op that reads the tensor; `output` is the end of the program
        slot       the slot of the op
        tensor     name of the tensor
        source     layout in which its producer writes it
        target     layout in which the op reads it
        forward    the steps from `source` to `target`, as text
        gradient   layout of the gradient that the op's backward yields; None where no gradient flows
        wanted     layout of the gradient that the producer's backward needs; None where no gradient flows
        backward   the steps from `gradient` to `wanted`, as text
    """

    op: str
    slot: str
    tensor: str
    source: LayoutText
    target: LayoutText
    forward: tuple[str, ...]
    gradient: LayoutText | None = None
    wanted: LayoutText | None = None
    backward: tuple[str, ...] = ()


@checked(frozen=True, slots=True, config=_STRICT)
class Stored:
    """The part of parameter `fqn` that a rank owns, updates and saves.

    `split` says what else is split where it is (`core.state_layouts`): `OGW O -`; "" for nothing but this part.
    """

    fqn: str
    layout: LayoutText
    split: str = ""

    @property
    def depths(self) -> Depths:
        """By axis, the depth that says what is split there; 0 where the parameter is not."""
        return parse_depths(self.split) if self.split else (0,) * len(self.layout)

    @property
    def regather(self) -> bool:
        """Whether the weight is split on some axis, and so gathered again for backward."""
        return 2 in self.depths


@checked(frozen=True, slots=True, config=_STRICT)
class StageBytes:
    """The bytes of a stage by kind, in parts: what it has beside other stages of its ranks, at any moment of theirs.

    With k microbatches in flight and w that wait for W these are

        between its actions   base + sums + k kept + w late       sums once a backward has ended
        in one of them        forward, backward, or that of the first backward, more: the most in any of them
        at the update         update, all together
    """

    base: dict[str, float]
    sums: dict[str, float]
    kept: dict[str, float]
    late: dict[str, float]
    forward: dict[str, float]
    backward: dict[str, float]
    first: dict[str, float]
    update: dict[str, float]


@checked(frozen=True, slots=True, config=_STRICT)
class Prediction:
    """The predicted seconds and bytes of one rank in one step.

        seconds          of the step, as the search priced it
        compute          seconds of the kernels
        communication    seconds by mesh axis; `net+node` for collectives over both
        volume           bytes that the rank sends, by axis
        nbytes           bytes by kind at the peak of the memory line
        fallback         seconds by op of the ops that have no rule
        update           seconds of the optimizer's update
        line_seconds     seconds of the time line and the update, where the plan was chosen by it
        line_bound       seconds below which those of no plan are, where the plan was chosen by it
        in_switches      the part of `volume`, by axis, that goes to switches that reduce
        parts            of a stage of a pipeline, its bytes in parts; else None
    """

    seconds: float
    compute: float
    communication: dict[str, float]
    volume: dict[str, float]
    nbytes: dict[str, float]
    fallback: dict[str, float]
    update: float = 0.0
    line_seconds: float | None = None
    line_bound: float | None = None
    in_switches: dict[str, float] = field(default_factory=dict)
    parts: StageBytes | None = None

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak of the memory line."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class PlanIndex:
    """The parts of a plan by name: decisions by op, conversions by (op, slot), stored parameters by fqn."""

    decisions: Mapping[str, Decision]
    conversions: Mapping[tuple[str, str], Conversion]
    stored: Mapping[str, Stored]


@checked(frozen=True, slots=True, config=_STRICT)
class Plan:
    """The result of planning: how one model trains on one cluster.

        model           name of the model
        mesh            the mesh of ranks
        decisions       layouts of every op and hub
        conversions     steps on every edge where a layout changes
        stored          stored layout of every parameter
        inputs          layout of every input of the program
        predicted       seconds and bytes of a rank in a step
        bound           seconds that no plan of the space is below, under the model of costs
        proof           how the bound was proved
        budget          bytes of memory of a device that the plan may use
        candidates      number of meshes and variants that were looked at
        cluster         name of the cluster
        backend         communication library, like `gloo` or `nccl`
        levels          level of the cluster by mesh axis
        fingerprints    hashes of the model's graph and of the cluster, and AutoDDL's version of plans
        sample          shapes and dtypes of the sample batch
        factory         how the shell makes the model again
        source          the options of planning, and the graph's text
        timings         seconds of each stage of planning; not written, so that equal inputs give equal files
        microbatches    microbatches of a step, one after the other
        bucket_bytes    limit of a bucket of gathers or gradients
        precision       recipe of dtypes, as text (`core.precision`)
        recompute       names of the blocks of which backward runs ops again (`core.recompute`)
        in_flight       microbatches whose activations are there at once; more than 1 in a stage of a pipeline alone
        waiting         others, whose gradients of weights wait for W (`core.pipeline.Flight`)
        later           how many more wait for W at another time (the same)
        pipeline        the stages, each with a plan of its own; None for a plan without stages
        version         of the format

    A plan with stages has no decisions of its own, and its mesh is `pipe` x `rank`: stages by ranks of a stage. Where
    stages have different numbers of ranks, its mesh is all ranks along `pipe`.
    """

    model: str
    mesh: MeshText
    decisions: tuple[Decision, ...]
    conversions: tuple[Conversion, ...]
    stored: tuple[Stored, ...]
    inputs: dict[str, LayoutText]
    predicted: Prediction
    bound: float
    proof: str
    budget: float
    candidates: int
    cluster: str
    backend: str
    levels: dict[str, str]
    fingerprints: dict[str, str]
    sample: dict[str, Any]
    factory: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    timings: Annotated[dict[str, float], Field(exclude=True)] = field(default_factory=dict, compare=False)
    microbatches: int = 1
    bucket_bytes: int = BUCKET_BYTES
    precision: str = "as-written"
    recompute: tuple[str, ...] = ()
    in_flight: int = 1
    waiting: int = 0
    later: int = 0
    pipeline: "Pipeline | None" = None
    version: int = VERSION

    @property
    def gap(self) -> float:
        """The most by which a better plan could be faster under the model, as a fraction of the plan's seconds."""
        seconds = self.predicted.seconds
        return max(0.0, (seconds - self.bound) / seconds) if seconds else 0.0

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        """The plan in three lines; `cli.plan_tables` prints all of it."""
        predicted, links = self.predicted, self.predicted.communication
        sent = ", ".join(f"{axes} {seconds * 1e3:.3g} ms" for axes, seconds in sorted(links.items())) or "none"
        stages, waiting = self._of_stages(sum(links.values()))
        return (f"plan of {self.model} for {self.cluster}: mesh {self.mesh}{stages}\n"
                f"{predicted.seconds * 1e3:.4g} ms a step: compute {predicted.compute * 1e3:.4g} ms, communication "
                f"{sent}{waiting}\n"
                f"{predicted.peak_bytes / 1e9:.3g} of {self.budget / 1e9:.3g} GB a rank; "
                f"at most {self.gap:.2%} from the best")

    def _of_stages(self, sent: float) -> tuple[str, str]:
        """Says what stages there are, and what the ranks that do most do besides computing and sending; or nothing."""
        if self.pipeline is None:
            return "", ""
        seconds, update = self.predicted.seconds, self.predicted.update
        idle = max(0.0, seconds - self.predicted.compute - sent - update)
        count = f", {self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return (f", {len(self.pipeline.stages)} stages, {schedule_title(self.pipeline.name)}"
                + count * (written_numbers(self.pipeline.name) is None),
                f", update {update * 1e3:.3g} ms on the ranks that do most, which wait for others "
                f"{idle / (seconds or 1.0):.1%} of it")

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs of its steps, and of messages between its stages, each once; sparse sums have none."""
        lanes = self.pipeline.codecs.values() if self.pipeline is not None else ()
        return tuple(dict.fromkeys((*(step.codec for _, step in self._steps() if step.codec and not step.is_sparse),
                                    *lanes)))

    @property
    def sparse_sums(self) -> Mapping[str, SparseRule]:
        """By name, the tensors, all parameters, whose gradients add up sparse (`core.sparse`), and how."""
        return {tensor: SparseRule.of(step.codec) for tensor, step in self._steps() if step.is_sparse}

    def _steps(self) -> Iterator[tuple[str, Step]]:
        """Every step of a conversion, with the name of its tensor."""
        for one in [self] if self.pipeline is None else [stage.plan for stage in self.pipeline.stages]:
            for c in one.conversions:
                for text in (*c.forward, *c.backward):
                    yield c.tensor, Step.parse(text, one.mesh)

    def without_codecs(self, sparse_alone: bool = False) -> "Plan":
        """The plan with the same steps and messages, whose values are all sent, and as they are.

        With `sparse_alone` sparse sums become whole ones, and what is coded stays so.
        """
        found = self._with_steps(lambda one: one if sparse_alone and not one.is_sparse else one.coded(""))
        if found.pipeline is None or sparse_alone:
            return found
        return replace(found, pipeline=replace(found.pipeline, coded=()))

    def with_warmup(self, most: int) -> "Plan":
        """The plan whose sparse sums have a warm-up and a fall of at most so many steps each."""
        def shorter(rule: SparseRule) -> SparseRule:
            return replace(rule, warmup=min(rule.warmup, most), falls=min(rule.falls, most))

        return self._with_steps(lambda one: one.coded(shorter(SparseRule.of(one.codec)).codec)
                                if one.is_sparse else one)

    def _with_steps(self, change: Callable[[Step], Step]) -> "Plan":
        """The plan with every step changed, those of its stages included."""
        def changed(texts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(change(Step.parse(text, self.mesh)).text(self.mesh) for text in texts)

        conversions = tuple(replace(c, forward=changed(c.forward), backward=changed(c.backward))
                            for c in self.conversions)
        if self.pipeline is None:
            return replace(self, conversions=conversions)
        stages = tuple(replace(stage, plan=stage.plan._with_steps(change)) for stage in self.pipeline.stages)
        return replace(self, conversions=conversions, pipeline=replace(self.pipeline, stages=stages))

    def index(self) -> PlanIndex:
        """The plan's parts by name, made anew at every call."""
        return PlanIndex({d.name: d for d in self.decisions}, {(c.op, c.slot): c for c in self.conversions},
                         {s.fqn: s for s in self.stored})

    def to_json(self) -> str:
        """The text of the plan file."""
        return json.dumps(_tree(self), indent=1, ensure_ascii=False) + "\n"

    def fingerprint(self) -> str:
        """A short hash of everything on which the ranks must agree; it leaves out how the plan was made."""
        data = _tree(self) | {"timings": {}, "factory": {}, "source": {}}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the plan file. Raises InputError where that fails."""
        write_atomically(Path(path), self.to_json())


@checked(frozen=True, slots=True, config=_STRICT)
class Stage:
    """A stage of a pipeline.

        ops      its ops [first, end), as `core.stages` counts them
        ranks    its ranks [first, end)
        plan     the plan of its graph on these ranks
    """

    ops: tuple[int, int]
    ranks: tuple[int, int]
    plan: Plan


@checked(frozen=True, slots=True, config=_STRICT)
class Pipeline:
    """The stages of a plan, in order, and the schedule in which ranks run them.

        name        of the schedule, like `1f1b`
        schedule    the schedule as text (`core.pipeline`), whose ranks are those of the mesh axis `pipe`
        stages      the stages
        coded       the lanes that are sent coded, like `forward add_3 0 -> 1 as bfloat16` (`schedule.stage_lanes`)
    """

    name: str
    schedule: str
    stages: tuple[Stage, ...]
    coded: tuple[str, ...] = ()

    @property
    def codecs(self) -> dict[str, str]:
        """By lane, as text, the codec that it is sent as."""
        return {lane: codec for lane, _, codec in (text.rpartition(" as ") for text in self.coded)}

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the graph is cut."""
        return tuple(stage.ops[0] for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """By part of the cluster, its ranks [first, end); parts may have different numbers of them."""
        where = Schedule.parse(self.schedule).placement[0]
        found = dict(zip(where, (stage.ranks for stage in self.stages), strict=False))
        return tuple(found[part] for part in sorted(found))

    def part_of(self, rank: int) -> int:
        """The part of the cluster that has a rank of the plan, which is the schedule's rank."""
        return next(part for part, (first, end) in enumerate(self.ranks) if first <= rank < end)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of every part of the cluster; none where all are equal."""
        found = tuple(end - first for first, end in self.ranks)
        return found if len(set(found)) > 1 else ()


rebuild_dataclass(Plan, force=True)  # type: ignore[arg-type]
_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)


def _tree(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; what only few have is left out of others: pipelines, switches that reduce."""
    return _without_defaults(_ADAPTER.dump_python(plan, mode="json"))


def _without_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    if tree["in_flight"] == 1:
        del tree["in_flight"]
    for name in ("waiting", "later"):
        if tree[name] == 0:
            del tree[name]
    if not tree["predicted"]["in_switches"]:
        del tree["predicted"]["in_switches"]
    if tree["predicted"]["parts"] is None:
        del tree["predicted"]["parts"]
    if tree["pipeline"] is None:
        del tree["pipeline"]
    elif not tree["pipeline"]["coded"]:
        del tree["pipeline"]["coded"]
    for decision in tree["decisions"]:
        if not decision["inner"]:
            del decision["inner"]
    for stage in tree.get("pipeline", {}).get("stages", ()):
        _without_defaults(stage["plan"])
    return tree


def load_plan(path: str | Path) -> Plan:
    """The plan in the file `path`.

    Raises InputError, naming the file, where it cannot be read or holds no plan. A peak above the budget and a bound
    above the seconds raise it too. So does a conversion whose steps do not lead from its one layout to the other.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror or error}{_plan_hint(str(path))}") from None
    except ValueError as error:
        raise InputError(f"{path} is no plan: not JSON ({error})") from None
    return parse_plan(text, str(path))


def _plan_hint(path: str) -> str:
    """Says which file is asked for, and of a name that looks like another argument that it does."""
    what = "a factory" if is_factory(path) else "a cluster file" if path.endswith((".yaml", ".yml")) else ""
    return f"; {f'{path} looks like {what}: ' * bool(what)}a plan, as `plan -o` wrote it, is asked for here"


def parse_plan(text: str, path: str) -> Plan:
    """The plan that the JSON `text` says; errors are as those of `load_plan`, and name `path`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is no plan: not JSON ({error}){_plan_hint(path)}") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise InputError(f"{path} is a plan of version {found}; this AutoDDL reads version {VERSION}: "
                         "make the plan again")
    try:
        plan = _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is no plan: at {where or 'the top'}: {first['msg']}") from None
    try:
        Precision.parse(plan.precision)
        _check_numbers(plan)
        _check_conversions(plan)
    except InputError as error:
        raise InputError(f"{path} is no plan: {error}; plan again instead of editing the file") from None
    return plan


def _check_numbers(plan: Plan) -> None:
    """Raise InputError where the peak is above the budget or the bound above the seconds: no planner writes that."""
    if plan.predicted.peak_bytes > plan.budget:
        raise InputError(f"its peak of {plan.predicted.peak_bytes:g} bytes is above its budget of {plan.budget:g}")
    if plan.bound > plan.predicted.seconds * (1 + EXACT):
        raise InputError(f"its bound of {plan.bound:g} s is above its {plan.predicted.seconds:g} s")


def _check_conversions(plan: Plan) -> None:
    """Raise InputError where the steps of a conversion do not lead from its layout to its target, or back."""
    known: dict[tuple[tuple[str, ...], Layout, Layout], bool] = {}
    for one in plan.conversions:
        ways = [("forward", one.forward, one.source, one.target)]
        if one.gradient is not None and one.wanted is not None:
            ways.append(("backward", one.backward, one.gradient, one.wanted))
        elif one.backward:
            raise InputError(f"{one.tensor} -> {one.op} has backward steps, but no layouts of a gradient")
        for name, texts, source, target in ways:
            key = texts, source, target
            if key not in known:
                known[key] = _leads(plan.mesh, *key)
            if not known[key]:
                raise InputError(f"the {name} steps of {one.tensor} -> {one.op} ({', '.join(texts) or 'none'}) do not "
                                 f"lead from {source} to {target} on mesh {plan.mesh}")


def _leads(mesh: Mesh, texts: tuple[str, ...], source: Layout, target: Layout) -> bool:
    """Whether the steps, as text, lead legally from `source` to `target`, both layouts of `mesh`."""
    if not len(source) == len(target) == len(mesh.axes):
        return False
    return is_conversion(tuple(Step.parse(text, mesh) for text in texts), source, target)


def level_of(plan: Plan, axes: str) -> str:
    """Name of the cluster's level that a collective over `axes` crosses: that of the first axis with one, or ""."""
    return next((level for name in axes.split("+") if (level := plan.levels.get(name))), "")
