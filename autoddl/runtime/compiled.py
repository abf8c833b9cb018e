"""Compiles what a rank computes between two messages of its program (torch.compile; Ansel et al. 2024, "PyTorch 2").

    program     call, call, | message, | call, call, call, | gather, | call ...
    compiled    one function per stretch of calls; messages and gathers stay as they are, in their order

A stretch ends where the program communicates, takes gathered parameters, draws random numbers or computes a gradient
apart. It also ends in front of a *cut*, the first reader of a weight of another gradient bucket. For a compiled
backward hands out all its gradients when it ends, and a bucket is sent as soon as it is full. Casts of weights, which
read no result, move in front of the stretch.

Ops of a block that backward runs again are not compiled, since each of them tells autograd what to keep.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException

from autoddl.core.errors import InputError, MachineError
from autoddl.runtime.recompute import cut_out

__all__ = ["COMPUTES", "EARLY", "Compile", "compile_stretches", "compiler"]

COMPUTES = "computes"
"""The mark in a node's `meta` of a call that only computes: a compiler may take it together with its neighbours."""

EARLY = "early"
"""The mark of a call that reads arguments of the program alone: it may run before the stretch in which it stands."""

Compile = Callable[[fx.GraphModule], Callable[..., tuple[object, ...]]]


def compiler(backend: str | Callable[..., object]) -> Compile:
    """Compiles stretches by torch.compile, for the sizes of this plan; `backend` is one of torch.compile's.

    The first step compiles. It raises MachineError where the compiler fails, as without a C++ compiler on a CPU. Raises
    InputError for a backend that torch.compile does not know.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        raise InputError(f"compile={backend!r}: torch.compile has no such backend here, it has {', '.join(known)}; "
                         "give one of them, compile=True for inductor, or compile=False")

    def compile_stretch(stretch: fx.GraphModule) -> Callable[..., tuple[object, ...]]:
        function = torch.compile(stretch, backend=backend, dynamic=False)

        def run(*values: object) -> tuple[object, ...]:
            try:
                found: tuple[object, ...] = function(*values)
            except TorchDynamoException as error:
                raise MachineError(f"torch.compile fails here: {str(error).strip().splitlines()[0]}; give "
                                   "compile=False, or plan without --compiled") from error
            return found
        return run
    return compile_stretch


def compile_stretches(program: fx.Graph, cuts: Collection[fx.Node], compile_stretch: Compile) -> None:
    """Replaces every stretch of several computing calls in `program` by one call of what `compile_stretch` returns.

        program           a program whose computing calls are marked COMPUTES
        cuts              the calls in front of which a stretch ends
        compile_stretch   makes a function of a stretch: the same values in, a tuple of its results out
    """
    for k, nodes in enumerate(list(_stretches(program, cuts))):
        inside = frozenset(nodes)
        inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
        results = [node for node in nodes if not inside.issuperset(node.users)]
        function = compile_stretch(cut_out(nodes, inputs, results))
        function.__name__ = function.__qualname__ = f"compiled_{k}"
        with program.inserting_after(nodes[-1]):
            call = program.call_function(function, tuple(inputs))
        after = call
        for j, node in enumerate(results):
            with program.inserting_after(after):
                after = program.call_function(operator.getitem, (call, j))
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, after)
        for node in reversed(nodes):
            program.erase_node(node)


def _stretches(program: fx.Graph, cuts: Collection[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    """The computing nodes that follow each other, where more than one of them is a call; early calls go before them."""
    nodes: list[fx.Node] = []
    for node in [*program.nodes]:
        if nodes and EARLY in node.meta:
            nodes[0].prepend(node)
            continue
        if nodes and (node in cuts or not _computes(node)):
            yield from _several(nodes)
            nodes = []
        if _computes(node):
            nodes.append(node)


def _several(nodes: list[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    if sum(node.target is not operator.getitem for node in nodes) > 1:
        yield nodes


def _computes(node: fx.Node) -> bool:
    """Whether a node only computes; a part of a tuple does if what made the tuple does."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _computes(source)
    return COMPUTES in node.meta or node.target is torch.Tensor.detach
