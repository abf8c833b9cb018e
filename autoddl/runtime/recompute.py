"""Cuts the blocks that backward computes again out of a rank's program.

    before      x -> a -> b -> c -> y                         one function, whose values autograd saves
    after       x -> block(inputs) -> y                       block: a, b, c as a function of its own

A block runs forward without autograd and saves its inputs alone. Its backward runs it again with autograd and goes back
through it at once; the gradients of all its inputs come at its end. Inputs are saved as autograd saves a tensor, so of
parameters that are gathered again it keeps notes (`parameter_gather`). The cone and the gathers of parameters stay
outside: they run before the block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autoddl.runtime.recorder import Recorder

__all__ = ["cut_blocks"]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A block's program; `flows` says of each result whether a gradient comes back to it."""

    program: fx.GraphModule
    flows: tuple[bool, ...]
    recorder: Recorder

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            found: tuple[Tensor, ...] = self.program.forward(*inputs)
            return found
        return _Again.apply(self, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Again(torch.autograd.Function):
    """Saves the inputs of a block, and runs it again for backward."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        results: tuple[Tensor, ...] = run.program.forward(*inputs)
        ctx.mark_non_differentiable(*(x for x, flows in zip(results, run.flows, strict=True) if not flows))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        needs = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad(), run.recorder.computing_again():
            results = run.program.forward(*inputs)
        asked = [(x, g) for x, g in zip(results, gradients, strict=True) if g is not None and x.requires_grad]
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad([x for x, _ in asked], wanted, [g for _, g in asked], allow_unused=True))
        return None, *(next(found) if need else None for need in needs)


def cut_blocks(program: fx.Graph, blocks: Mapping[str, Sequence[fx.Node]], recorder: Recorder) -> fx.Graph:
    """The program in which each of the blocks, given as nodes by name, is one call; the nodes must be in order.

    A node's `meta["flows"]` says whether a gradient comes back to it.
    """
    if not blocks:
        return program
    where = {node: name for name, nodes in blocks.items() for node in nodes}
    outside = _order(program, blocks, where)
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in outside:
        if node not in where:
            env[node] = made.node_copy(node, env.__getitem__)
            continue
        nodes = blocks[where[node]]
        inputs = list(dict.fromkeys(x for one in nodes for x in one.all_input_nodes if where.get(x) != where[node]))
        results = [one for one in nodes if any(where.get(user) != where[node] for user in one.users)]
        run = _Run(_alone(nodes, inputs, results), tuple(bool(x.meta.get("flows")) for x in results), recorder)
        call = made.call_function(_named(run, where[node]), tuple(env[x] for x in inputs))
        env |= {x: made.call_function(getitem, (call, k)) for k, x in enumerate(results)}
    return made


def _order(program: fx.Graph, blocks: Mapping[str, Sequence[fx.Node]], where: Mapping[fx.Node, str]) -> list[fx.Node]:
    """The nodes outside, and the first node of every block behind those that stand among its nodes."""
    found, waiting, left = list[fx.Node](), None, 0
    for node in program.nodes:
        if node not in where:
            found.append(node)
            continue
        if waiting is None:
            waiting, left = node, len(blocks[where[node]])
        left -= 1
        if not left:
            found.append(waiting)
            waiting = None
    return found


def _alone(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    """Nodes as a program of their own: `inputs` -> `results`."""
    graph = fx.Graph()
    env = {x: graph.placeholder(f"x{k}") for k, x in enumerate(inputs)}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[x] for x in results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _named(run: _Run, name: str) -> Any:
    """The block as a function under its name, by which generated code calls it."""
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        return run(*inputs)
    call.__name__ = call.__qualname__ = "block_" + "".join(c if c.isalnum() else "_" for c in name)
    return call
