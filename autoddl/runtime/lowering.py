"""Captured program + plan -> the program of one rank, as generated fx code.

Every op becomes its kernel on this rank's pieces (`kernels.lower`), every edge where the plan converts a `Route`, every
parameter the value that its bucket gathered. A hub is no call: it names the converted value. fx writes the program as
one Python function, which drops each value after its last use.

    program(*values) -> (loss, *new buffers)      values: the tensors of `Lowered.reads`, local pieces

What it returns is as its op writes it; `Lowered.ends` bring it to every rank whole, which nothing has to wait for.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autoddl.capture.capture import Captured
from autoddl.core.conversion import Step
from autoddl.core.errors import MachineError
from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.layout import Layout
from autoddl.core.plan import Conversion, Plan
from autoddl.operators.kernels import custom_ops
from autoddl.operators.kernels.arguments import bound, parameters
from autoddl.operators.kernels.site import Site
from autoddl.operators.kernels.table import lower as local_call
from autoddl.operators.rules.nn import REDUCING
from autoddl.runtime.process_groups import Groups
from autoddl.runtime.recorder import Recorder
from autoddl.runtime.redistribute import Route, moves
from autoddl.schedule.traffic import option_of

__all__ = ["Lowered", "Parameters", "axes_of", "lower"]


_DIRECT: Mapping[object, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(torch, name) for name, overload in (
        ("add", "Tensor"), ("sub", "Tensor"), ("mul", "Tensor"), ("div", "Tensor"), ("reshape", "default"),
        ("transpose", "int"), ("permute", "default"), ("unsqueeze", "default"), ("matmul", "default"),
        ("bmm", "default"), ("tanh", "default"), ("relu", "default"), ("rsqrt", "default"), ("cos", "default"),
        ("sin", "default"))}
"""torch's own binding of an operator: the same function, called 2 us faster than through the operator."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Where the program finds parameters: `taken` bucket by fqn with the position inside, `local` by fqn a call on the
    leaf, and every other one is its leaf."""

    take: Callable[[int], tuple[Tensor, ...]]
    taken: Mapping[str, tuple[int, int]]
    local: Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class Lowered:
    """`reads` are the graph's tensors that the program takes, in order; `ends` how each of its results goes on."""

    program: fx.GraphModule
    reads: tuple[int, ...]
    ends: tuple[Route, ...]


def axes_of(plan: Plan, graph: Graph) -> set[tuple[int, ...]]:
    """Every set of axes that something of the plan communicates over."""
    texts = {text for c in plan.conversions for text in (*c.forward, *c.backward)}
    found = {Step.parse(text, plan.mesh).axes for text in texts}
    decisions = plan.index().decisions
    reducing = (op for op in graph.ops if op.target in REDUCING)
    return found | {inner for op in reducing
                    if (inner := option_of(op, graph, plan.mesh, decisions.get(op.name)).inner)}


def lower(captured: Captured, graph: Graph, plan: Plan, groups: Groups, parameters: Parameters, recorder: Recorder,
          device: torch.device, seed: Tensor | None, training: bool = True) -> Lowered:
    """The program of the rank of `groups`; without `training` nothing is dropped. `graph` is the planned one."""
    return _Lowering(captured, graph, plan, groups, parameters, recorder, device, seed, training).run()


@dataclass
class _Lowering:
    captured: Captured
    graph: Graph
    plan: Plan
    groups: Groups
    parameters: Parameters
    recorder: Recorder
    device: torch.device
    seed: Tensor | None
    training: bool
    out: fx.Graph = field(default_factory=fx.Graph)
    env: dict[int, fx.Node] = field(default_factory=dict)
    shared: dict[tuple[int, tuple[str, ...]], fx.Node] = field(default_factory=dict)
    buckets: dict[int, fx.Node] = field(default_factory=dict)

    def run(self) -> Lowered:
        graph, nodes = self.graph, {node.name: node for node in self.captured.program.graph.nodes}
        self.index = self.plan.index()
        self.flows = graph.differentiable()
        self.keys = {t: key for key, t in self.captured.tensors.items() if isinstance(key, tuple)}
        wanted = {t for op in graph.ops for t in op.inputs} | {graph.outputs[0]} | {new for _, new in graph.updates}
        reads = tuple(t for t in sorted(wanted) if graph.tensors[t].kind is not Kind.RESULT
                      and graph.tensors[t].fqn not in self.parameters.taken)
        for t in reads:
            self.env[t] = self.out.placeholder(f"v{t}")
        for op in graph.ops:
            if op.target == HUB:
                self.env[op.outputs[0]] = self.value(op, 0)
            else:
                self.emit(op, nodes[op.name], wanted)
        ends = [(graph.outputs[0], "loss"), *((new, graph.tensors[old].fqn) for old, new in graph.updates)]
        self.out.output(tuple(self.env[t] for t, _ in ends))
        routes = tuple(self.route(t, self.index.conversions.get(("output", slot))) for t, slot in ends)
        return Lowered(fx.GraphModule(torch.nn.Module(), self.out), reads, routes)

    def value(self, op: Op, k: int) -> fx.Node:
        """Input k of `op`, converted; without its history where no gradient comes back from the op."""
        t = op.inputs[k]
        tensor = self.graph.tensors[t]
        if tensor.kind is Kind.PARAMETER:
            node = self.parameter(t, tensor.fqn)
        else:
            node = self.convert(t, self.index.conversions.get((op.name, op.slots[k])))
        if self.flows.isdisjoint(op.outputs) and (t in self.flows or tensor.trained):
            return self.out.call_function(torch.Tensor.detach, (node,))
        return node

    def parameter(self, t: int, fqn: str) -> fx.Node:
        if fqn in self.parameters.taken and t not in self.env:
            b, _ = self.parameters.taken[fqn]
            take = self.out.call_function(_named(lambda: self.parameters.take(b), f"take_{b}"), ())
            ids = {self.graph.tensors[i].fqn: i for i in range(len(self.graph.tensors))
                   if self.graph.tensors[i].kind is Kind.PARAMETER}
            for member, (bucket, k) in self.parameters.taken.items():
                if bucket == b:
                    self.env[ids[member]] = self.out.call_function(operator.getitem, (take, k))
        elif fqn in self.parameters.local and (t, ()) not in self.shared:
            call = _named(self.parameters.local[fqn], f"use_v{t}")
            self.shared[t, ()] = self.env[t] = self.out.call_function(call, (self.env[t],))
        return self.env[t]

    def convert(self, t: int, conversion: Conversion | None) -> fx.Node:
        """Tensor t after a conversion; equal ones that are local and carry no gradient are done once."""
        if conversion is None:
            return self.env[t]
        key = (t, conversion.forward)
        if conversion.gradient is None and key in self.shared:
            return self.shared[key]
        route = self.route(t, conversion)
        if not (route.forward or route.backward):
            return self.env[t]
        node = self.out.call_function(_named(route.__call__, f"to_{conversion.op}_{conversion.slot}"), (self.env[t],))
        if conversion.gradient is None and not any(move.sends for move in route.forward):
            self.shared[key] = node
        return node

    def route(self, t: int, c: Conversion | None) -> Route:
        if c is None:
            return Route((), ())
        mesh, shape = self.plan.mesh, self.graph.tensors[t].shape

        def path(texts: tuple[str, ...], start: Layout | None, direction: str) -> Any:
            steps = [Step.parse(text, mesh) for text in texts]
            return moves(steps, [shape], [start], self.groups, self.recorder, direction, f"{c.tensor} for {c.op}") \
                if start is not None else ()

        return Route(path(c.forward, c.source, "forward"), path(c.backward, c.gradient, "backward"))

    def emit(self, op: Op, node: fx.Node, wanted: set[int]) -> None:
        """The kernel's call, and the results that someone reads."""
        inputs = {slot: self.value(op, k) for k, slot in enumerate(op.slots)}
        args, kwargs = self.arguments(node, inputs)
        target = node.target
        assert callable(target)
        if not self.training and target is custom_ops.dropout:
            self.env[op.outputs[0]] = inputs["x"]
            return
        if not self.training and target is custom_ops.attention:
            args, kwargs = (), bound(target, args, kwargs) | {"dropout_p": 0.0}
        fn, args, kwargs = local_call(self.site(op), target, args, kwargs)
        call = self.out.call_function(_DIRECT.get(fn, fn), args, kwargs)
        call.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        for t in op.outputs:
            if t in self.keys and t in wanted:
                self.env[t] = self.out.call_function(operator.getitem, (call, self.keys[t][1]))
            elif t not in self.keys:
                self.env[t] = call

    def site(self, op: Op) -> Site:
        tensors = self.graph.tensors
        return Site(op, tuple(tensors[t] for t in op.inputs), tuple(tensors[t] for t in op.outputs),
                    option_of(op, self.graph, self.plan.mesh, self.index.decisions.get(op.name)), self.plan.mesh,
                    self.groups.coordinate, partial(self.reduce, op.name), self.seed)

    def arguments(self, node: fx.Node, inputs: Mapping[str, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's own arguments with its tensors replaced, slot by slot."""
        names = parameters(node.target)  # type: ignore[arg-type]

        def replaced(name: str, value: Any) -> Any:
            if isinstance(value, fx.Node):
                return inputs[name]
            if isinstance(value, list | tuple) and any(isinstance(part, fx.Node) for part in value):
                return [inputs[f"{name}.{k}"] if isinstance(part, fx.Node) else part for k, part in enumerate(value)]
            return self.device if name == "device" and value is not None else value

        return (tuple(replaced(name, value) for name, value in zip(names, node.args, strict=False)),
                {name: replaced(name, value) for name, value in node.kwargs.items()})

    def reduce(self, name: str, tensor: Tensor, how: str, axes: tuple[int, ...]) -> Tensor:
        """An all-reduce inside the kernel of op `name`."""
        names = "+".join(self.plan.mesh.names[a] for a in axes)
        if self.groups.of(axes) is None:
            return tensor
        buffer, recorder = tensor.contiguous(), self.recorder
        nbytes = buffer.numel() * buffer.element_size()
        recorder.note(recorder.direction, "all-reduce", names, nbytes, name)
        try:
            self.groups.start("all-reduce", axes, buffer, buffer, asynchronous=False, how=how)
        except RuntimeError as error:
            raise MachineError(f"all-reduce over {names} inside a kernel failed: {error}") from error
        recorder.started(None)
        return buffer


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` under a name of its own, by which generated code calls it."""
    def call(*args: Any) -> Any:
        return function(*args)
    call.__name__ = call.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
    return call
