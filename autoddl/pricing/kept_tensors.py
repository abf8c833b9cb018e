"""Lets hubs say whether their tensor is kept, so that rows of bytes come closer to the memory line.

Several ops may keep what they read of one hub h, each as it is or converted. Together they keep

    sum over converted reads of their copies  +  the tensor of h, if any of them reads it as it is

The last term is none of a sum over edges. In the network made here every such hub has its choices twice:

    kept        readers may read the tensor as it is; it lives until backward comes to the last of them
    not kept    none of them may, and it does not

Seconds are those of the network that it is made of, so an optimum has the same choices. A choice of the one is mapped
to the other by `plain` and `settled`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.core.cost_table import Cells, Classes
from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import HUB
from autoddl.core.recompute import blocks_of
from autoddl.operators.footprints.table import whole_footprints
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.build_problem import CostNetwork, Row
from autoddl.pricing.choices import numbered
from autoddl.pricing.edge_tables import seconds_twice
from autoddl.pricing.entries import Entry
from autoddl.pricing.space import Variable

__all__ = ["KeptTensors", "keepers_of", "with_kept_tensors"]


@dataclass(frozen=True, eq=False)
class KeptTensors:
    """A network whose hubs say whether their tensor is kept.

        network    all choices, with those of such hubs twice
        counts     by place in a choice, the number of choices that such a hub has without that
        readers    by place, the reads of its tensor that backward needs: (place of the reader, its input)
    """

    network: CostNetwork
    counts: Mapping[int, int]
    readers: Mapping[int, tuple[tuple[int, int], ...]]

    def plain(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice without what hubs say of their tensors."""
        found = list(choice)
        for v, count in self.counts.items():
            found[v] %= count
        return tuple(found)

    def settled(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A plain choice where each hub says what its readers do."""
        found, first = list(choice), len(self.network.policies.blocks)
        variables = self.network.variables
        for v, count in self.counts.items():
            (layout,) = variables[v - first].choices[choice[v]].outputs
            if all(variables[r - first].choices[choice[r]].inputs[k] != layout for r, k in self.readers[v]):
                found[v] += count
        return tuple(found)

    def row_bytes(self, choice: Sequence[int], row: Row) -> float:
        """The bytes of `row` under a plain choice."""
        return self.network.row_bytes(self.settled(choice), row)


def with_kept_tensors(network: CostNetwork) -> KeptTensors:
    """The network of the same choices in which hubs say whether their tensor is kept."""
    pricing = network.pricing
    kept = keepers_of(pricing.graph, pricing.cluster.device.kind == "cpu")
    place = {v.item.name: n for n, v in enumerate(network.variables) if isinstance(v.item, Op)}
    hubs = {place[pricing.graph.ops[j].name]: reads for j, reads in kept.items() if pricing.graph.ops[j].name in place}
    single = {id(network.variables[n].choices): network.variables[n].choices for n in hubs}
    twice, first = {key: numbered(choices).twice() for key, choices in single.items()}, len(network.policies.blocks)
    variables = tuple(Variable(v.item, twice[id(v.choices)]) if n in hubs else v
                      for n, v in enumerate(network.variables))
    made = replace(network, variables=variables, kept=kept, _sizes={}, _found={},
                   entries=tuple(_entry(one, network.variables, hubs) for one in network.entries))
    names = [op.name for op in pricing.graph.ops]
    return KeptTensors(made, {first + n: len(network.variables[n].choices) for n in hubs},
                       {first + n: tuple((first + place[names[i]], k) for i, k in reads) for n, reads in hubs.items()})


def keepers_of(graph: Graph, processor: bool) -> dict[int, tuple[tuple[int, int], ...]]:
    """By hub of an activation, the reads (op, slot) of it that backward needs, where there are several.

    All are in the hub's own block, or outside of blocks as it is, and no op that writes the tensor keeps it anyway.
    """
    readers, writer, made = graph.consumers(), graph.producers(), whole_footprints(graph, processor)
    block = {i: n for n, one in enumerate(blocks_of(graph)) for i in range(one.start, one.end)}
    saves = {i: made[i] for i, op in enumerate(graph.ops) if base(op) not in VIEWS}
    found = dict[int, tuple[tuple[int, int], ...]]()
    for j, op in enumerate(graph.ops):
        t = op.inputs[0] if op.target == HUB else -1
        while t >= 0 and t in writer and writer[t] not in saves:
            t = graph.ops[writer[t]].inputs[0]
        source = writer.get(t)
        if source is None or graph.ops[source].outputs.index(t) in saves[source].keeps:
            continue
        reads = tuple(sorted((i, k) for i, k in readers[op.outputs[0]] if i in saves and k in saves[i].saves))
        if len(reads) > 1 and len({block.get(i, -1) for i in (j, *(i for i, _ in reads))}) == 1:
            found[j] = reads
    return found


def _entry(entry: Entry, variables: Sequence[Variable], hubs: Mapping[int, tuple[tuple[int, int], ...]]) -> Entry:
    """The entry over the choices of hubs that are there twice."""
    at = [v in hubs for v in entry.variables]
    if not any(at):
        return entry
    if len(at) == 1 and entry.owner is not None:
        count = 2 * len(variables[entry.variables[0]].choices)
        return replace(entry, likeness=_named("kept", entry), classes=(np.arange(count),),
                       seconds=(Cells.of(np.zeros(count)),) * len(entry.seconds))
    classes = tuple(_again(c) if twice else c for c, twice in zip(entry.classes, at, strict=True))
    if entry.ends is None or not at[0] or entry.owner is None or entry.owner[1:] not in hubs[entry.variables[0]]:
        return replace(entry, likeness=_named("twice", entry), classes=classes)
    ends = entry.ends.twice
    return replace(entry, likeness=_named("kept", entry), ends=ends, classes=(ends.classes[0], classes[1]),
                   seconds=tuple(seconds_twice(one, entry.ends) for one in entry.seconds))


def _named(kind: str, entry: Entry) -> tuple[tuple[object, ...], ...]:
    return tuple((kind, key) for key in entry.likeness)


def _again(classes: Classes) -> Classes:
    return np.concatenate([classes, classes])
