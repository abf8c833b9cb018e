"""Knows of a plan what a trainer's configuration needs besides degrees: the model's parts in order.

A *unit* is a block, like `layers.3`, or a module beside the blocks, like `tokens` or `head`. Trainers cut pipelines
between units, and shard and recompute by them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, graph_from_text
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.plan import Plan
from autoddl.core.recompute import Block, blocks_of
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.export.target import TensorPiece

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """A model and its cluster, as a plan knows them.

        model      name of the model
        graph      the captured graph of one microbatch
        cluster    the devices
        sample     shapes and dtypes of the sample
        factory    how the shell makes the model again
        pieces     the parameters that tensor parallelism splits, where it is known how
        norms      the modules beside products that read parameters of one dim
    """

    model: str
    graph: Graph
    cluster: Cluster
    sample: Mapping[str, Any]
    factory: Mapping[str, Any] = field(default_factory=dict)
    pieces: tuple[TensorPiece, ...] = ()
    norms: tuple[str, ...] = ()

    @cached_property
    def hubs(self) -> Graph:
        """The graph with hubs."""
        return add_hubs(self.graph)

    @cached_property
    def rows(self) -> int:
        """Rows of a microbatch on all ranks together: the leading dim of the first input. 1 where there is none."""
        return next((t.shape[0] for t in self.graph.tensors if t.kind is Kind.INPUT and t.shape), 1)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a row where the first input has two dims, else 1."""
        first = next((t.shape for t in self.graph.tensors if t.kind is Kind.INPUT and t.shape), ())
        return first[1] if len(first) == 2 else 1

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, as positions of needed ops."""
        return blocks_of(replace(self.graph, ops=needed_ops(self.graph), outputs=self.graph.outputs[:1]))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units in the order in which they begin: blocks, and the outermost modules beside them."""
        return tuple(dict.fromkeys(self._units()))

    def _units(self) -> Iterator[str]:
        names = [block.name for block in self.blocks]
        lists = {name.rpartition(".")[0] for name in names}
        for op in needed_ops(self.graph):
            module = op.module
            block = next((n for n in names if module == n or module.startswith(f"{n}.")), None)
            if block is not None:
                yield block
            elif module:
                depth = max((len(name.split(".")) for name in lists if module.startswith(f"{_head(name)}.")), default=1)
                yield ".".join(module.split(".")[:depth])

    def layers(self, cuts: tuple[int, ...]) -> tuple[int, ...] | None:
        """By stage, the number of blocks, where no cut is inside one and none is among what surrounds them; else None.

        `cuts` are positions of needed ops.
        """
        count, ends = len(needed_ops(self.graph)), [block.end for block in self.blocks]
        starts = [block.start for block in self.blocks]
        if not self.blocks or any(cut not in starts and cut not in ends for cut in cuts):
            return None
        return tuple(sum(a <= at < b for at in starts) for a, b in pairwise([0, *cuts, count]))

    def cuts(self, layers: tuple[int, ...], stages: int) -> tuple[int, ...]:
        """The positions at which stages of so many blocks begin; () stands for equally many in `stages` of them.

        Raises InputError where the model has another number of blocks.
        """
        count = len(self.blocks)
        if not layers:
            if not count or count % stages:
                raise InputError(f"{stages} stages cannot have equally many of the {count} blocks of {self.model}: say "
                                 "how many each has, or take another number of stages")
            layers = (count // stages,) * stages
        if sum(layers) != count:
            raise InputError(f"the stages have {'+'.join(map(str, layers))} = {sum(layers)} blocks, and {self.model} "
                             f"has {count}: let them agree")
        starts, found, at = [*(block.start for block in self.blocks), self.blocks[-1].end], [], 0
        for own in layers[:-1]:
            at += own
            found.append(starts[at])
        return tuple(found)

    def beginnings(self, layers: tuple[int, ...], stages: int) -> tuple[str, ...]:
        """The modules with which stages but the first begin. Raises InputError as `cuts`."""
        ops = needed_ops(self.graph)
        return tuple(self._begins(ops[cut:]) for cut in self.cuts(layers, stages))

    def _begins(self, ops: Sequence[Op]) -> str:
        names = [block.name for block in self.blocks]
        module = next((op.module for op in ops if op.module), "")
        return next((name for name in names if module == name or module.startswith(f"{name}.")), module)

    @cached_property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names of one parameter."""
        return tuple((t.fqn, alias) for t in self.graph.tensors if t.kind is Kind.PARAMETER for alias in t.aliases)


def _head(name: str) -> str:
    return name.rpartition(".")[0] or name


def subject_of(plan: Plan) -> Subject:
    """The subject of a plan. Raises InputError for a plan that does not keep it."""
    if not {"graph", "cluster"} <= plan.source.keys():
        raise InputError("this plan does not say what it was made from: an earlier version made it; make it again")
    return Subject(plan.model, graph_from_text(plan.source["graph"]),
                   parse_cluster(plan.source["cluster"], "the plan's cluster"), plan.sample, plan.factory)
