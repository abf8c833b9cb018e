"""Lists the actions of one rank in a step, in the order of the runtime, each with its price in seconds.

Forward runs the ops in the order of the graph, backward in the reverse. Conversions of activations are waited for at
once. Those of the loss and of new buffers are waited for at the end of backward, since nothing reads them before.
Parameters are gathered ahead and their gradients reduced behind (`parameter_order`).

Before an op runs forward, its inputs are converted, from the first to the last. Backward of an op first fills the
leaves that the op read without a conversion. It then goes through its inputs from the last to the first. This is the
order of autograd.

Backward of the first op that reads back what runs again (`operators.recomputed`) waits for the parameters that are
gathered again for that, and runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoddl.core.conversion import Step
from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.plan import Conversion, Decision, Plan, PlanIndex
from autoddl.core.split_backward import weights_of
from autoddl.cost_models import Cluster
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.ring import SHIFT, ring_turns
from autoddl.operators.rules.nn import REDUCING, inner_collectives
from autoddl.operators.work import weight_kernels
from autoddl.pricing.beside import beside_seconds
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice
from autoddl.schedule.actions import Action, Actions, Compute, Leg, Pass, Start
from autoddl.schedule.buckets import ParameterEdge, gather_buckets, gradient_buckets, parameter_edges
from autoddl.schedule.parameter_order import TimedGathers, TimedReductions
from autoddl.schedule.traffic import option_of

__all__ = ["KnownPrices", "list_actions"]


@dataclass(frozen=True, slots=True)
class KnownPrices:
    """Prices that plans share which differ in their bucket size alone, for one rank.

    `kernels` are seconds by (op, direction), and by (op, "late") those that wait for W; `legs` the priced steps of
    activations by (op, slot, direction). By op, `inside` has the messages inside its kernels.
    """

    kernels: dict[tuple[str, str], float] = field(default_factory=dict)
    legs: dict[tuple[str, str, str], tuple[Leg, ...]] = field(default_factory=dict)
    inside: dict[str, tuple[Start, ...]] = field(default_factory=dict)


def list_actions(plan: Plan, graph: Graph, cluster: Cluster, rank: int = 0, known: KnownPrices | None = None,
                 as_searched: bool = False, adds: float = 1.0) -> tuple[Action, ...]:
    """The actions of `rank` in one step. `graph` is the planned one, of one microbatch; `known` keeps prices.

    `adds` is the part that counts of every addition of gradients.

    With `as_searched` a parameter has its share of the collectives of a full bucket, as the search prices it. The
    actions are those of a backward that is not split.
    """
    pricing = Pricing(graph, plan.mesh, cluster, microbatches=plan.microbatches, recompute=plan.recompute)
    actions = Actions(pricing, plan.mesh.coordinate(rank), as_searched, adds)
    rows = parameter_edges(plan, graph)
    edges = {edge.tensor.fqn: edge for edge in rows}
    program = _Program(plan, graph, actions, edges, TimedGathers(actions, edges, gather_buckets(plan, graph, rows)),
                       TimedReductions(actions, edges, gradient_buckets(plan, graph, rows)), known or KnownPrices())
    for part in range(plan.microbatches):
        program.run(part)
    return tuple(actions.done)


@dataclass
class _Program:
    """Writes the actions of a step, op by op.

        plan          the plan
        graph         the planned graph, of one microbatch
        actions       the actions so far
        edges         the parameters' conversions by name
        gathers       the gathers of parameters
        reductions    the reductions of their gradients
        known         prices so far
        part          number of the microbatch
        index         the plan by names
    """

    plan: Plan
    graph: Graph
    actions: Actions
    edges: dict[str, ParameterEdge]
    gathers: TimedGathers
    reductions: TimedReductions
    known: KnownPrices
    part: int = 0
    index: PlanIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = self.plan.index()
        self.flows, self.behind = self.graph.differentiable(), _behind(self.graph)
        self.weights = weights_of(self.graph)
        self.triggers = {part.trigger: part for part in self.actions.pricing.parts}

    def run(self, part: int) -> None:
        """Forward and backward of one microbatch."""
        self.part, last = part, part == self.plan.microbatches - 1
        self.gathers.begin(last)
        self.reductions.begin(part, last)
        self.actions.done.append(Pass("forward"))
        for i, op in enumerate(self.graph.ops):
            self.arrive(i, op)
            self.kernels(op, "forward")
        ends = [self.start_legs(self.legs(self.index.conversions.get(("output", slot)), t, "forward"))
                for t, slot in self.ends()]
        self.actions.done.append(Pass("backward"))
        self.edge(self.index.conversions.get(("output", "loss")), self.graph.outputs[0], "backward")
        for i, op in reversed(list(enumerate(self.graph.ops))):
            if i in self.triggers:  # before the op reads what it saved
                self.compute_again(self.triggers[i])
            self.gathers.read_back({self.behind[t] for t in op.inputs if t in self.behind})
            self.kernels(op, "backward")
            self.hand_back(i, op)
        self.reductions.finish()
        for k, rest in ends:
            self.actions.wait(k)
            self.actions.run(rest)

    def start_legs(self, legs: Sequence[Leg]) -> tuple[int | None, Sequence[Leg]]:
        """Runs local steps and starts the first collective; returns its number and the steps that are left."""
        for k, leg in enumerate(legs):
            if (number := self.actions.start(leg)) is not None:
                return number, legs[k + 1:]
        return None, ()

    def ends(self) -> list[tuple[int, str]]:
        updates = [(new, self.graph.tensors[old].fqn) for old, new in self.graph.updates]
        return [(self.graph.outputs[0], "loss"), *updates]

    def parameters(self, op: Op) -> dict[int, str]:
        """Position among the inputs -> fqn."""
        tensors = ((k, self.graph.tensors[t]) for k, t in enumerate(op.inputs))
        return {k: tensor.fqn for k, tensor in tensors if tensor.kind is Kind.PARAMETER}

    def as_it_is(self, fqn: str) -> bool:
        """Whether the leaf is read without a step or a cast."""
        return fqn not in self.edges or self.edges[fqn].is_direct

    def compute_again(self, part: RecomputedPart) -> None:
        """Runs the ops of a part in backward, and the conversions of what others read."""
        self.gathers.read_back({self.behind[t] for i in part.ops for t in self.graph.ops[i].inputs if t in self.behind})
        for i in part.steps:
            op = self.graph.ops[i]
            fqns = self.parameters(op)
            for k, t in enumerate(op.inputs):
                if k not in fqns and (i in part.ops or (i, k) in part.copies):
                    legs = self.legs(self.index.conversions.get((op.name, op.slots[k])), t, "forward")
                    pricing, name = self.actions.pricing, self.graph.tensors[t].name
                    share = pricing.share_again(op.name, k, beside_seconds(pricing, name, op.name))
                    self.actions.run([in_backward(leg, share) for leg in legs])
            if op.name in self.actions.pricing.again:
                self.kernels(op, "forward", again=True)

    def arrive(self, i: int, op: Op) -> None:
        """Converts the inputs of op i."""
        fqns = self.parameters(op)
        for k, t in enumerate(op.inputs):
            if k not in fqns:
                self.edge(self.index.conversions.get((op.name, op.slots[k])), t, "forward")
            elif fqns[k] in self.gathers.place:
                self.gathers.take(fqns[k], i)
            elif not self.as_it_is(fqns[k]) and self.part == 0:
                edge, ends = self.edges[fqns[k]], self.edges[fqns[k]].conversion
                self.actions.run(self.actions.legs(edge.forward, [edge.tensor.stored], [ends.source], "forward",
                                                   fqns[k]))
                self.actions.cast(edge.tensor.stored, edge.tensor, [ends.source, ends.target], fqns[k])

    def hand_back(self, i: int, op: Op) -> None:
        """Converts the gradients of the inputs of op i."""
        fqns = self.parameters(op)
        self.reductions.add([fqn for fqn in fqns.values() if self.as_it_is(fqn)])
        for k, t in reversed(list(enumerate(op.inputs))):
            if k not in fqns:
                self.edge(self.index.conversions.get((op.name, op.slots[k])), t, "backward")
            elif not self.as_it_is(fqns[k]):
                self.reductions.add(self.gathers.handed_on(i, fqns[k]))

    def edge(self, c: Conversion | None, t: int, direction: str) -> None:
        """Runs an activation's conversion, each step waited for."""
        self.actions.run(self.legs(c, t, direction))

    def legs(self, c: Conversion | None, t: int, direction: str) -> tuple[Leg, ...]:
        """The priced steps of a conversion. A slice that carries no gradient is free."""
        if c is None:
            return ()
        key = c.op, c.slot, direction
        if key not in self.known.legs:
            self.known.legs[key] = self._legs(c, t, direction)
        return self.known.legs[key]

    def _legs(self, c: Conversion, t: int, direction: str) -> tuple[Leg, ...]:
        texts, start = (c.forward, c.source) if direction == "forward" else (c.backward, c.gradient)
        steps = [Step.parse(text, self.plan.mesh) for text in texts]
        if start is None or (c.gradient is None and all(step.kind == "slice" for step in steps)):
            return ()
        return self.actions.legs(steps, [self.graph.tensors[t]], [start], direction, f"{c.tensor} for {c.op}",
                                 beside_seconds(self.actions.pricing, c.tensor, c.op))

    def kernels(self, op: Op, direction: str, again: bool = False) -> None:
        """Adds the op's kernels of one pass, then the collectives inside them; `again` is a forward in backward."""
        decision = self.index.decisions.get(op.name)
        if op.target == HUB or decision is None:
            return
        key = op.name, direction
        if key not in self.known.kernels:
            inner = option_of(op, self.graph, self.plan.mesh, decision).inner if op.target in REDUCING else ()
            choice = Choice(decision.inputs, decision.outputs, (), (), inner)
            both = pass_seconds(self.actions.pricing, op, choice, self.flows)
            self.known.kernels[op.name, "forward"], self.known.kernels[op.name, "backward"] = map(sum, both)
            waits = weight_kernels(op, self.flows, self.weights, len(both[1]))
            self.known.kernels[op.name, "late"] = sum(x for x, late in zip(both[1], waits, strict=True) if late)
        if op.target in REDUCING and self.ring(op, decision, direction, "backward" if again else direction):
            return
        if self.known.kernels[key]:
            late = self.known.kernels[op.name, "late"] if direction == "backward" else 0.0
            self.actions.done.append(Compute(op.name, self.known.kernels[key], late))
        if op.target in REDUCING:
            self.inner(op, decision, direction, "backward" if again else direction)

    def ring(self, op: Op, decision: Decision, direction: str, noted: str) -> bool:
        """Runs the blocks of ring attention with the shifts beside them, and what goes before and after; false of an
        op that is none."""
        legs = self.inside(op, decision, direction, noted)
        places = [k for k, leg in enumerate(legs) if leg.sent.kind == SHIFT]
        if not places:
            return False
        self.actions.run(legs[:places[0]])
        started: dict[int, int | None] = {}
        turns = ring_turns(direction, len(places) + 1 if direction == "forward" else (len(places) + 1) // 2)
        block = self.known.kernels[op.name, direction] / sum(what == "compute" for what, _ in turns)
        for what, k in turns:
            if what == "start":
                started[k] = self.actions.start(legs[places[k]])
            elif what == "wait":
                self.actions.wait(started[k])
            else:
                self.actions.done.append(Compute(op.name, block))
        self.actions.run(legs[places[-1] + 1:])
        return True

    def inside(self, op: Op, decision: Decision, direction: str, noted: str) -> list[Start]:
        """The messages inside the op's kernels of one pass, which a record notes under the pass `noted`."""
        if op.name not in self.known.inside:
            option = option_of(op, self.graph, self.plan.mesh, decision)
            every = inner_collectives(op, self.graph, option.inputs, option.inner, self.plan.mesh, self.actions.at)
            self.known.inside[op.name] = tuple(self.actions.leg(*one, op.name) for one in every)
        return [leg if noted == direction else replace(leg, sent=replace(leg.sent, direction=noted))
                for leg in self.known.inside[op.name] if leg.sent.direction == direction]

    def inner(self, op: Op, decision: Decision, direction: str, noted: str) -> None:
        """Runs the collectives inside the op's kernels of one pass, which a record notes under the pass `noted`."""
        self.actions.run(self.inside(op, decision, direction, noted))


def in_backward(leg: Leg, share: float) -> Leg:
    """A step of a forward conversion, as backward runs it again, in a `share` of its seconds."""
    leg = replace(leg, seconds=leg.seconds * share) if share < 1 else leg
    return replace(leg, sent=replace(leg.sent, direction="backward")) if isinstance(leg, Start) else leg


def _behind(graph: Graph) -> dict[int, str]:
    """For each tensor, the parameter that it is, or whose value it passes on through hubs."""
    found = {t: tensor.fqn for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER}
    for op in graph.ops:
        if op.target == HUB and op.inputs[0] in found:
            found[op.outputs[0]] = found[op.inputs[0]]
    return found
