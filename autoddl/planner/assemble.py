"""Writes a solution down as a plan: the choices by name, the steps of every conversion, the prediction in its parts.

The parts are priced again from the plan's own steps, and must add up to the solution's seconds. A plan whose steps do
not explain its optimum is never written.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from autoddl.core.conversion import COLLECTIVES, Step, group_size, slice_steps, step_sizes
from autoddl.core.graph import RECEIVE, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import Layout, local_shape
from autoddl.core.plan import BUCKET_BYTES, Conversion, Decision, Plan, Prediction, Stored
from autoddl.core.problem import Solution
from autoddl.core.stages import SEND
from autoddl.core.state_layouts import Depths, added_layout, kept_layout, show_depths, summed_layout
from autoddl.cost_models import link_of
from autoddl.operators.ring import gathers_keys
from autoddl.operators.rules.table import has_rule
from autoddl.pricing.beside import beside_seconds
from autoddl.pricing.edges import carries, edges_of, gathered_back
from autoddl.pricing.floors import cone_cost
from autoddl.pricing.kernel_prices import inner_seconds, inner_sent, op_seconds
from autoddl.pricing.price import Pricing, add_seconds, cast_seconds, steps_of, update_seconds
from autoddl.pricing.space import Choice, Variable
from autoddl.pricing.sparse_routes import sparse_steps
from autoddl.schedule.buckets import has_collective

__all__ = ["Assembled", "assemble", "assemble_choice", "plan_of"]


@dataclass(slots=True)
class _Parts:
    """Adds up seconds and sent bytes by mesh axes, and the seconds that no axis has (`local`).

    `switched` are the bytes that go to switches that reduce."""

    pricing: Pricing
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    volume: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    switched: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    local: float = 0.0

    def add(self, tensor: Tensor, steps: tuple[Step, ...], start: Layout, times: int = 1,
            priced: float | None = None, beside: float = 0.0) -> None:
        """Adds the price of `steps` from layout `start`, `times` over, as the tables priced them.

        Their seconds count `priced` times, where that is another number. They are sent `beside` so many seconds.
        """
        mesh = self.pricing.mesh
        bucketed, priced = tensor.kind is Kind.PARAMETER, times if priced is None else priced
        price = self.pricing.bucket_seconds if bucketed else partial(self.pricing.step_seconds, beside=beside)
        sizes = step_sizes(steps, tensor.shape, tensor.itemsize, start, mesh)
        for step, (full, touched) in zip(steps, sizes, strict=True):
            cost = price(step, full, touched, tensor.itemsize) * priced
            if step.kind in COLLECTIVES:
                name, ranks = "+".join(mesh.names[a] for a in step.axes), group_size(step, mesh)
                kind, nbytes = step.sends(ranks, full, tensor.itemsize)
                self.seconds[name] += cost
                self.send(name, *self.pricing.sent_bytes(kind, step.axes, nbytes, bucketed), times)
            else:
                self.local += cost

    def send(self, axes: str, nbytes: float, in_switches: bool, times: int) -> None:
        """Adds bytes that a rank sends over `axes`, `times` over."""
        self.volume[axes] += nbytes * times
        if in_switches:
            self.switched[axes] += nbytes * times

    def cast(self, source: Tensor, target: Tensor, layouts: Sequence[Layout], times: int) -> None:
        """Adds the price of casting the smallest of the shards in several layouts, `times` over."""
        elements = min(prod(local_shape(source.shape, layout, self.pricing.mesh)) for layout in layouts)
        self.local += cast_seconds(self.pricing, source, target, elements) * times

    def add_up(self, tensor: Tensor, layout: Layout) -> None:
        """Adds the price of adding gradients of the microbatches up in a layout."""
        elements = prod(local_shape(tensor.shape, layout, self.pricing.mesh))
        self.local += add_seconds(self.pricing, tensor, elements) * (self.pricing.microbatches - 1)


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a plan that the choices determine."""

    decisions: tuple[Decision, ...]
    conversions: tuple[Conversion, ...]
    stored: tuple[Stored, ...]
    inputs: dict[str, Layout]
    predicted: Prediction


def _texts(steps: tuple[Step, ...], pricing: Pricing) -> tuple[str, ...]:
    return tuple(step.text(pricing.mesh) for step in steps)


def _edges(pricing: Pricing, variables: tuple[Variable, ...], chosen: tuple[Choice, ...], parts: _Parts
           ) -> list[Conversion]:
    """The conversions between variables. A parameter's edge is always listed: running asks it for the used layout."""
    graph, found = pricing.graph, []
    differentiable = graph.differentiable()
    read = gathered_back(pricing, differentiable)
    for edge in edges_of(graph, variables):
        source, target = variables[edge.source], variables[edge.target]
        assert isinstance(target.item, Op)
        writes, reads = chosen[edge.source], chosen[edge.target]
        tensor = graph.tensors[edge.tensor]
        flows = carries(edge, target, differentiable)
        backward: tuple[Step, ...] = ()
        if isinstance(source.item, Tensor):
            ends = _Ends(writes.outputs[0], reads.inputs[edge.slot], writes.depths,
                         reads.gradients[edge.slot] if flows else None, writes.sparse)
            forward, backward = _parameter(pricing, tensor, ends, edge.tensor in read, parts)
        else:
            at, m = (target.item.name, edge.slot), pricing.microbatches
            beside = beside_seconds(pricing, tensor.name, target.item.name)
            forward = steps_of(pricing, tensor, writes.outputs[edge.port], reads.inputs[edge.slot], "activations",
                               beside)
            parts.add(tensor, forward, writes.outputs[edge.port], m * (1 + pricing.converts_again(*at)),
                      m * (1 + pricing.share_again(*at, beside)), beside)
            if flows:
                backward = steps_of(pricing, tensor, reads.gradients[edge.slot], writes.wanted[edge.port],
                                    "activations", beside)
                parts.add(tensor, backward, reads.gradients[edge.slot], m, beside=beside)
        if forward or backward or isinstance(source.item, Tensor):
            found.append(Conversion(
                target.item.name, target.item.slots[edge.slot], tensor.name, writes.outputs[edge.port],
                reads.inputs[edge.slot], _texts(forward, pricing), reads.gradients[edge.slot] if flows else None,
                writes.wanted[edge.port] if flows else None, _texts(backward, pricing)))
    return found


@dataclass(frozen=True, slots=True)
class _Ends:
    """The layouts of a parameter where it is stored and where it is used, and its depths.

    `yielded` is the layout in which backward yields the gradient; None where there is none. `sparse` says whether its
    sum is sparse.
    """

    stored: Layout
    used: Layout
    depths: Depths
    yielded: Layout | None
    sparse: bool


def _parameter(pricing: Pricing, tensor: Tensor, ends: _Ends, saved: bool, parts: _Parts
               ) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of a parameter by way of W, and of its gradient by way of G, with their prices added to `parts`."""
    way, m = partial(steps_of, pricing), pricing.microbatches
    kept = kept_layout(ends.stored, ends.used, ends.depths)
    once, each = way(tensor, ends.stored, kept, "weights"), way(tensor, kept, ends.used, "weights")
    parts.add(tensor, once, ends.stored)
    parts.add(tensor, each, kept, m * (1 + saved))
    if tensor.master:
        first_sends, then_sends = has_collective(once), has_collective(each)
        times = m * (1 + saved) if then_sends and not first_sends else 1
        sliced = () if first_sends or then_sends else (ends.used,)
        parts.cast(tensor.stored, tensor, (ends.stored, *sliced), times)
    if ends.yielded is None:
        return once + each, ()
    summed = summed_layout(ends.stored, ends.yielded, ends.depths) if m > 1 else ends.yielded
    first = way(tensor.gradient, ends.yielded, summed, "gradients")
    last = sparse_steps(pricing, tensor.gradient, summed, ends.stored) if ends.sparse else \
        way(tensor.gradient, summed, ends.stored, "gradients")
    sends = has_collective(first), has_collective(last)
    parts.add(tensor.gradient, first, ends.yielded, m if sends[0] or not sends[1] else 1)
    parts.add(tensor.gradient, last, summed, 1 if sends[1] else m)
    parts.cast(tensor, tensor.gradient, (ends.yielded,), m)
    if m > 1:
        parts.add_up(tensor, added_layout(ends.stored, ends.yielded, summed, sends))
    return once + each, first + last


def _ends(pricing: Pricing, variables: tuple[Variable, ...], chosen: tuple[Choice, ...], parts: _Parts
          ) -> list[Conversion]:
    """The conversions from the ops that write the loss and the new buffers to the program's end, where all is B."""
    graph, whole, found = pricing.graph, Layout.broadcast(pricing.mesh), []
    ends = {graph.outputs[0]: "loss"} | {new: graph.tensors[old].fqn for old, new in graph.updates}
    for variable, choice in zip(variables, chosen, strict=True):
        if isinstance(variable.item, Tensor):
            continue
        for port, t in enumerate(variable.item.outputs):
            if t in ends:
                tensor, flows = graph.tensors[t], t == graph.outputs[0]
                forward = steps_of(pricing, tensor, choice.outputs[port], whole, "")
                backward = steps_of(pricing, tensor, whole, choice.wanted[port], "") if flows else ()
                parts.add(tensor, forward, choice.outputs[port], pricing.microbatches)
                parts.add(tensor, backward, whole, pricing.microbatches)
                if forward or backward:
                    found.append(Conversion("output", ends[t], tensor.name, choice.outputs[port], whole,
                                            _texts(forward, pricing), whole if flows else None,
                                            choice.wanted[port] if flows else None, _texts(backward, pricing)))
    return found


def _cone(pricing: Pricing, variables: tuple[Variable, ...], chosen: tuple[Choice, ...]
          ) -> tuple[list[Conversion], dict[str, Layout]]:
    """The conversions by which ops slice tensors of the cone, and the layout in which every input of the model is fed.

    An input that all its readers take in one layout is fed in that layout.
    """
    graph, mesh = pricing.graph, pricing.mesh
    dependent, whole = graph.dependent(), Layout.broadcast(pricing.mesh)
    readers = {v.item.name: c for v, c in zip(variables, chosen, strict=True) if isinstance(v.item, Op)}
    taken: dict[int, set[Layout]] = defaultdict(set)
    for op in graph.ops:
        for k, t in enumerate(op.inputs):
            taken[t].add(readers[op.name].inputs[k] if op.name in readers else whole)
    fed = {t: next(iter(taken[t])) if len(taken[t]) == 1 and "P" not in str(next(iter(taken[t]))) else whole
           for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.INPUT}
    found = []
    for op in graph.ops:
        for k, t in enumerate(op.inputs):
            have = fed.get(t, whole)
            if t not in dependent and op.name in readers and readers[op.name].inputs[k] != have:
                want = readers[op.name].inputs[k]
                found.append(Conversion(op.name, op.slots[k], graph.tensors[t].name, have, want,
                                        _texts(slice_steps(mesh, have, want), pricing)))
    return found, {graph.tensors[t].fqn: layout for t, layout in fed.items()}


def _unruled(pricing: Pricing, variables: tuple[Variable, ...], chosen: tuple[Choice, ...]) -> dict[str, float]:
    """Seconds, by operator, of the ops that run replicated because no rule is known for them."""
    differentiable = pricing.graph.differentiable()
    found: dict[str, float] = defaultdict(float)
    for variable, choice in zip(variables, chosen, strict=True):
        if isinstance(variable.item, Op) and variable.item.target not in (HUB, SEND, RECEIVE) \
                and not has_rule(variable.item):
            seconds = op_seconds(pricing, variable.item, choice, differentiable)
            found[variable.item.target] += seconds * pricing.microbatches
    return dict(found)


def assemble(pricing: Pricing, solution: Solution, variables: tuple[Variable, ...]) -> Assembled:
    """The parts of the plan of a solution; `memory_line.with_memory_peak` adds its bytes later.

    Raises AssertionError, for a bug, where the parts do not add up to the solution's seconds.
    """
    made = assemble_choice(pricing, solution.choice, variables)
    if abs(made.predicted.seconds - solution.seconds) > 1e-6 * solution.seconds:
        raise AssertionError(f"the plan's parts add up to {made.predicted.seconds} s, the solution claims "
                             f"{solution.seconds} s")
    return made


def assemble_choice(pricing: Pricing, options: Sequence[int], variables: tuple[Variable, ...]) -> Assembled:
    """The parts of the plan that takes option `options[i]` of variable i, with all of its seconds counted."""
    graph = pricing.graph
    chosen = tuple(v.choices[i] for v, i in zip(variables, options, strict=True))
    parts, whole = _Parts(pricing), Layout.broadcast(pricing.mesh)
    conversions = _edges(pricing, variables, chosen, parts) + _ends(pricing, variables, chosen, parts)
    sliced, inputs = _cone(pricing, variables, chosen)
    decided = {v.item.name: c for v, c in zip(variables, chosen, strict=True) if isinstance(v.item, Op)}
    decisions, differentiable = [], graph.differentiable()
    times = pricing.microbatches
    compute = cone_cost(pricing)[0] * times + parts.local
    for op in graph.ops:
        choice = decided.get(op.name, Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ()))
        decisions.append(Decision(op.name, op.target, choice.inputs, choice.outputs,
                                  choice.wanted[0] if op.target == HUB else None,
                                  bool(choice.inner) and gathers_keys(op, choice.inputs)))
        if op.name in decided and op.target != HUB:
            compute += op_seconds(pricing, op, choice, differentiable) * times
            for axes, seconds in (inner_seconds(pricing, op, choice) if choice.inner else {}).items():
                parts.seconds[axes] += seconds * times
            for sent in inner_sent(pricing, op, choice) if choice.inner else ():
                parts.send(*sent, times)
    stored = tuple(Stored(v.item.fqn, c.outputs[0], show_depths(c.outputs[0], c.depths))
                   for v, c in zip(variables, chosen, strict=True) if isinstance(v.item, Tensor))
    named = {s.fqn for s in stored}
    idle = tuple(Stored(t.fqn, whole) for t in graph.tensors if t.kind is Kind.PARAMETER and t.fqn not in named)
    update = sum(update_seconds(pricing, v.item, c.outputs[0]) for v, c in zip(variables, chosen, strict=True)
                 if isinstance(v.item, Tensor))
    total = compute + sum(parts.seconds.values()) + update
    predicted = Prediction(total, compute, dict(parts.seconds), dict(parts.volume), {},
                           _unruled(pricing, variables, chosen), update, in_switches=dict(parts.switched))
    return Assembled(tuple(decisions), tuple(conversions + sliced), stored + idle, inputs, predicted)


def plan_of(made: Assembled, pricing: Pricing, solution: Solution, about: Mapping[str, Any]) -> Plan:
    """The plan: `made`, its proof, and what it was made from (`about`: model, budget, candidates, sample ...)."""
    cluster = pricing.cluster
    levels = {axis.name: link_of(cluster, pricing.group((a,))) if axis.size > 1 else ""
              for a, axis in enumerate(pricing.mesh.axes)}
    return Plan(mesh=pricing.mesh, decisions=made.decisions, conversions=made.conversions, stored=made.stored,
                inputs=made.inputs, predicted=made.predicted, proof=solution.proof, cluster=cluster.name,
                backend=cluster.backend, levels=levels, microbatches=pricing.microbatches,
                bucket_bytes=BUCKET_BYTES, recompute=pricing.recompute, in_flight=pricing.in_flight,
                waiting=pricing.waiting, later=pricing.later, **about)
