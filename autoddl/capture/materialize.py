"""Draws values for samples and models that were planned without any, on the meta device.

An index of an embedding must be below the number of its rows, and a label below the number of classes. So `limits`
follows every input through the graph to its readers. All values are drawn from a seed, and every rank draws the same.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, named
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op
from autoddl.operators.families import family_of
from autoddl.operators.work import base

__all__ = ["SEED", "arguments", "filled", "give", "limits", "materialise", "materialised"]

SEED = 20_240_229


def limits(graph: Graph) -> dict[str, int]:
    """By name of an input, the number of values that a whole number in it may take; only inputs with a limit."""
    consumers, found = graph.consumers(), dict[str, int]()
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is Kind.INPUT:
            bound = _limit(t, graph, consumers, set())
            if bound is not None:
                found[tensor.fqn] = bound
    return found


def _limit(t: int, graph: Graph, consumers: Mapping[int, tuple[tuple[int, int], ...]], seen: set[int]) -> int | None:
    seen.add(t)
    bounds = []
    for i, k in consumers[t]:
        op = graph.ops[i]
        bound = _of_reader(op, op.slots[k], graph)
        if bound is None and "values" in family_of(base(op)).flags:
            bound = min((b for out in op.outputs if out not in seen
                         for b in [_limit(out, graph, consumers, seen)] if b is not None), default=None)
        bounds += [bound] if bound is not None else []
    return min(bounds, default=None)


def _of_reader(op: Op, slot: str, graph: Graph) -> int | None:
    """How many values the operator can read in `slot`; None if any."""
    first = graph.tensors[op.inputs[0]]
    if op.target.startswith(("aten.embedding", "autoddl.embedding")) and slot == "indices":
        return first.shape[0]
    if op.target.startswith(("autoddl.token_loss", "aten.nll_loss", "aten.cross_entropy")) and slot == "target":
        return first.shape[1] if len(first.shape) > 1 else first.shape[0]
    if op.target == "autoddl.ctc_loss" and slot == "targets":
        return first.shape[2]
    return None


def filled(model: nn.Module, sample: Sample, seed: int = SEED) -> Sample:
    """The sample with values drawn for its tensors on the meta device; the others keep theirs."""
    names = named(model.forward, sample)
    if not any(_empty(leaf) for leaf in names.values()):
        return sample
    bounds = limits(capture(model, sample).graph)
    generator = torch.Generator().manual_seed(seed)
    least = {id(leaf): min(bounds.get(n, 2) for n, other in names.items() if other is leaf) for leaf in names.values()}
    values = {id(leaf): _draw(leaf, least[id(leaf)], generator) for leaf in names.values() if _empty(leaf)}
    args, kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def _empty(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _draw(like: Tensor, bound: int, generator: torch.Generator) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)
    if like.dtype is torch.bool:
        return torch.ones(like.shape, dtype=torch.bool)
    return torch.randint(0, bound, like.shape, generator=generator, dtype=torch.int64).to(like.dtype)


def materialised(model: nn.Module, seed: int = SEED) -> nn.Module:
    """The model itself, with values drawn for its tensors on the meta device: small matrices, vectors near one."""
    generator = torch.Generator().manual_seed(seed)
    give(model, lambda tensor: _initial(tensor, generator))
    return model


def _initial(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) * 0.02
    return (noise if tensor.dim() > 1 else 1 + noise).to(tensor.dtype)


def arguments(model: nn.Module, batch: Sample, captured: Captured) -> list[Tensor]:
    """The arguments of the captured program: the model's own parameters, copies of its buffers, the inputs.

    Parameters are cast to the dtypes in which the program reads them, under autograd.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers, inputs = dict(model.named_buffers(remove_duplicate=False)), named(model.forward, batch)
    found: list[Tensor] = []
    for t, tensor in enumerate(captured.graph.tensors):
        match tensor.kind:
            case Kind.PARAMETER:
                found.append(parameters[tensor.fqn].to(getattr(torch, tensor.dtype)))
            case Kind.BUFFER:
                found.append(buffers[tensor.fqn].clone())
            case Kind.CONSTANT:
                found.append(captured.constants[t])
            case Kind.INPUT:
                found.append(inputs[tensor.fqn])
    return found


def materialise(model: nn.Module, seed: int) -> None:
    """Gives tensors on the meta device memory and the initial values of their modules, equal on every rank.

    Ties stay, and so do tensors with values. Raises InputError for a module without `reset_parameters`.
    """
    resets = [module for name, module in model.named_modules() if _unmade(name, module)]
    give(model, lambda tensor: torch.empty_like(tensor, device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in resets:
            module.reset_parameters()


def _unmade(name: str, module: nn.Module) -> bool:
    """Whether `module` is to draw initial values: all that it has, or all below it, is on the meta device."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    below = own or [*module.parameters(), *module.buffers()]
    reset, without = callable(getattr(module, "reset_parameters", None)), any(t.is_meta for t in own)
    kind = f"{name or 'the model'} ({type(module).__name__})"
    if without and not reset:
        raise InputError(f"{kind} is on the meta device and has no reset_parameters(): build the model on the CPU, or "
                         "load its weights before parallelize")
    if without and not all(t.is_meta for t in own):
        raise InputError(f"{kind} has values for a part of its own tensors and none for the others, which are on the "
                         "meta device: load all of them before parallelize, or none")
    return reset and bool(below) and all(t.is_meta for t in below)


def give(model: nn.Module, value: Callable[[Tensor], Tensor]) -> None:
    """Replaces every tensor of the model on the meta device by `value` of it; ties stay."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        new = value(tensor)
                        made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) \
                            if isinstance(tensor, nn.Parameter) else new
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
