"""Captures a module and a sample: the Graph, and the program that computes it.

    trace         torch.export of a fake copy of the module                         (trace.py)
    passes        one vocabulary of operators, our losses                           (passes.py)
    randomness    draws by position, and so alike in every layout                   (randomness.py)
    arrange       placeholders: one per parameter (ties are one), buffer, constant, input; DCE
    autocast      in bf16-mixed, the casts that torch.autocast makes                (autocast.py); else parameters that
                  a region of autocast casts are used in its dtype                  (autocast_casts.py)
    chained       concatenations of growing lists                                   (growing_lists.py)
    tabulate      every node becomes an Op, every value a Tensor                    (build_graph.py)

The program is an `fx.GraphModule`. A call program(*values) takes one tensor per PARAMETER, BUFFER, CONSTANT and INPUT,
in the order of `graph.tensors`, where they come first. It returns (*graph.outputs, *new values of graph.updates). Under
autograd it computes the same bits as the module. It makes constants (arange, full) on the CPU; everything else follows
the device of its inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from autoddl.capture.build_graph import Key, Leaf, check_shapes, tabulate
from autoddl.capture.fx_tools import insert
from autoddl.capture.gc_pause import pause_gc
from autoddl.capture.patches.torch_export_patch import delay_code_generation, shorten_stacks
from autoddl.capture.returned import Returned, returned
from autoddl.capture.rewrites.autocast import autocast
from autoddl.capture.rewrites.autocast_casts import use_cast
from autoddl.capture.rewrites.complex_products import real_rotations, real_scatters
from autoddl.capture.rewrites.growing_lists import chained
from autoddl.capture.rewrites.passes import bags, gradients, losses, normalise, own_functions, unmerged
from autoddl.capture.rewrites.raising_branches import check_conditions
from autoddl.capture.rewrites.randomness import randomness
from autoddl.capture.sample import Sample, as_sample, describe, named, sample_for
from autoddl.capture.seen_shares import with_seen_shares
from autoddl.capture.trace import trace
from autoddl.core.errors import CaptureError
from autoddl.core.graph import Graph, Kind
from autoddl.core.precision import AS_WRITTEN, Precision
from autoddl.operators.rules.infinite import HUGE

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """A captured model: its training graph, and the program that computes it."""

    graph: Graph
    """The graph; INPUT tensors have the names that `sample.named` gives the arguments of a call."""
    program: GraphModule
    """The program that computes the graph."""
    nodes: tuple[str, ...]
    """By op, the name of its fx node."""
    tensors: Mapping[Key, int]
    """By fx node, or (node, k) where it yields several, the position of its tensor in the graph."""
    constants: Mapping[int, Tensor]
    """By position, the values of CONSTANT tensors."""
    spec: Mapping[str, Any]
    """The sample as JSON: shapes, dtypes, structure and plain values."""
    outputs: tuple[int, ...]
    """The tensors that forward returns, the loss first; -1 for one that is not in the graph."""
    returned: Returned
    """The names of these tensors, and how forward's output is built of them."""
    notes: tuple[str, ...] = ()
    """Lines on what is around the module and not in the graph (`wrappers`)."""


def capture(model: nn.Module, sample: object = None, precision: Precision = AS_WRITTEN) -> Captured:
    """The training graph of `model` in a recipe of precision, for arguments like those of `sample`.

    Its forward returns the scalar loss: alone, as .loss, as ['loss'], first of a tuple or its only scalar. Without a
    sample the model's own is taken (`sample_for`). Raises CaptureError for a model that cannot be captured, with the
    line of its code.
    """
    example = sample_for(model) if sample is None else as_sample(sample)
    with pause_gc(), delay_code_generation(), shorten_stacks():
        return _captured(model, example, precision)


def _rewrite(module: GraphModule, mixed: bool) -> None:
    """Rewrites operators of the program as those that have rules, in place."""
    real_rotations(module)
    real_scatters(module)
    normalise(module, mixed)
    unmerged(module)
    own_functions(module)
    randomness(module)
    losses(module)
    bags(module)


def _captured(model: nn.Module, example: Sample, precision: Precision) -> Captured:
    exported, names, notes = trace(model, example, getattr(torch, precision.stored) if precision.stored else None,
                                   precision.is_mixed)
    try:
        _rewrite(exported.graph_module, precision.is_mixed)
    except GuardOnDataDependentSymNode:  # a rewrite compared a size that values decide
        check_shapes(exported.graph_module)
        raise
    program, leaves, updates, output = _arrange(model, exported, names)
    leaves = _mixed(program, leaves, updates, precision)
    chained(program)
    gradients(program, frozenset(leaf.node for leaf in leaves if leaf.trained))
    values = {**dict(model.named_buffers(remove_duplicate=False)), **exported.constants,
              **named(model.forward, example)}
    leaves = tuple(replace(leaf, infinite=_is_infinite(leaf, values)) for leaf in leaves)
    graph, nodes, tensors = tabulate(program, leaves, updates)
    graph = with_seen_shares(graph, program, values)
    constants = {tensors[leaf.node]: exported.constants[leaf.fqn] for leaf in leaves if leaf.kind is Kind.CONSTANT}
    return Captured(graph, program, nodes, MappingProxyType(tensors), MappingProxyType(constants), describe(example),
                    graph.outputs, output, notes)


def _is_infinite(leaf: Leaf, values: Mapping[str, Any]) -> bool:
    """Whether a buffer, a constant or an input has infinite values, as additive masks do; not known of `meta`."""
    value = values.get(leaf.fqn) if leaf.kind is not Kind.PARAMETER else None
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or not value.numel():
        return False
    return bool(value.abs().amax() >= HUGE) if type(value) is Tensor else False


def _mixed(program: GraphModule, leaves: tuple[Leaf, ...], updates: tuple[str, ...], precision: Precision
           ) -> tuple[Leaf, ...]:
    """Makes the casts of the recipe, or of regions; returns the leaves with dtypes of masters and gradients."""
    buffers = {name: leaf.node for leaf in leaves if leaf.kind is Kind.BUFFER for name in (leaf.fqn, *leaf.aliases)}
    parameters = [leaf.node for leaf in leaves if leaf.kind is Kind.PARAMETER]
    before = {node.name: node.meta["val"].dtype for node in program.graph.nodes if node.name in parameters}
    if precision.is_mixed:
        autocast(program, parameters, [buffers[name] for name in updates])
    else:
        use_cast(program, parameters)
    found, used = [], {node.name: node.meta["val"].dtype for node in program.graph.nodes if node.name in before}
    for leaf in leaves:
        if leaf.node in used and (precision.is_mixed or used[leaf.node] != before[leaf.node]):
            dtypes = str(used[leaf.node]), str(before[leaf.node]), f"torch.{precision.reduce}"
            here, master, reduced = (dtype.removeprefix("torch.") for dtype in dtypes)
            floating = before[leaf.node].is_floating_point and leaf.trained
            leaf = replace(leaf, master=master if master != here else "",
                           reduced=reduced if floating and reduced != here else "")
        found.append(leaf)
    return tuple(found)


def _arrange(model: nn.Module, exported: ExportedProgram, names: dict[str, str]
             ) -> tuple[GraphModule, tuple[Leaf, ...], tuple[str, ...], Returned]:
    """The program with its placeholders in order and its outputs (loss, others ..., new buffers ...)."""
    graph = exported.graph_module.graph
    results, updates, output = _outputs(exported)
    results[0] = check_conditions(graph, results[0])
    leaves = _leaves(model, exported, names)
    holes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    last = next(node for node in graph.nodes if node.op == "output")
    last.args = ((*results, *_apart(last, results[0], [node for _, node in updates])),)
    for leaf in leaves:
        for tied in leaf.tied:
            holes[tied].replace_all_uses_with(holes[leaf.node])
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for leaf in leaves:
        first.prepend(holes.pop(leaf.node))
    for hole in holes.values():
        graph.erase_node(hole)
    graph.eliminate_dead_code()
    return GraphModule(nn.Module(), graph), leaves, tuple(buffer for buffer, _ in updates), output


def _apart(last: Node, loss: Node, new: Sequence[Node]) -> Iterator[Node]:
    """The new values of buffers as nodes of their own: a copy where two have one value, or one has the loss."""
    known = {loss}
    for node in new:
        copied = node in known
        known.add(node)
        yield insert(last, torch.ops.aten.clone.default, (node,), node.meta["val"]) if copied else node


def _leaves(model: nn.Module, exported: ExportedProgram, names: dict[str, str]) -> tuple[Leaf, ...]:
    """The placeholders of the program: parameters in the module's order (ties once), buffers, constants, inputs."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    specs = exported.graph_signature.input_specs
    nodes = {spec.target: spec.arg.name for spec in specs if spec.target in own}
    shared: dict[int, list[str]] = {}
    for fqn in own:
        if fqn in nodes:
            shared.setdefault(id(own[fqn]), []).append(fqn)
    leaves = []
    for fqn, *aliases in shared.values():
        kind = Kind.PARAMETER if fqn in parameters else Kind.BUFFER
        leaves.append(Leaf(nodes[fqn], fqn, kind, tuple(aliases), own[fqn].requires_grad,
                           tuple(nodes[alias] for alias in aliases)))
    leaves += [Leaf(spec.arg.name, spec.target or "", Kind.CONSTANT) for spec in specs
               if spec.kind is InputKind.CONSTANT_TENSOR]
    return (*leaves, *(Leaf(node, name, Kind.INPUT) for node, name in names.items()))


def _outputs(exported: ExportedProgram) -> tuple[list[Node], list[tuple[str, Node]], Returned]:
    """(loss, other tensors that forward returns), (buffer's name, its new value), and forward's output."""
    last = next(node for node in exported.graph.nodes if node.op == "output")
    specs = exported.graph_signature.output_specs
    pairs = list(zip(specs, last.args[0], strict=True))
    for spec, _ in pairs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(f"forward writes into its input {spec.target}; work on a copy, x.clone()")
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise CaptureError(f"forward writes into its parameter {spec.target}, which is split over ranks; do that "
                               "in the training loop, or work on a copy")
    updates = [(spec.target or "", value) for spec, value in pairs if spec.kind is OutputKind.BUFFER_MUTATION]
    user = [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]
    position = _loss(pytree.tree_unflatten(list(range(len(user))), exported.call_spec.out_spec))
    tensors = {k: node for k, node in enumerate(user)
               if isinstance(node, Node) and isinstance(node.meta["val"], Tensor)}
    scalars = [k for k, node in tensors.items() if not node.meta["val"].dim() and node.meta["val"].is_floating_point()]
    if position not in scalars and exported.call_spec.out_spec.type is tuple and len(scalars) == 1:
        position = scalars[0]  # (logits, loss)
    value = tensors[position].meta["val"] if position in tensors else None
    if position is None or value is None or value.dim() or not value.is_floating_point():
        found = "no tensor" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
        raise CaptureError("forward must return the scalar loss, alone, as .loss, ['loss'], first of a tuple or its "
                           f"only scalar; found {found}")
    order = [position, *(k for k in tensors if k != position)]
    return [tensors[k] for k in order], updates, returned(exported.call_spec.out_spec, user, order)


def _loss(output: Any) -> int | None:
    """The leaf of forward's output that is the loss; None where it has none."""
    if isinstance(output, int):
        return output
    if getattr(output, "loss", None) is not None:
        return _loss(output.loss)
    if isinstance(output, Mapping):
        return _loss(output["loss"]) if "loss" in output else None
    if isinstance(output, tuple | list) and output:
        return _loss(output[0])
    return None
