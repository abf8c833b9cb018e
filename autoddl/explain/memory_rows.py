"""Checks the rows of bytes of one plan against its memory line, from its graph and layouts alone.

A bound under a budget rests on rows: sums over moments of weight * bytes, which the memory line is never below. The
certificate proves the bound of the row; here the row itself is checked. Bytes at every moment are added up again, from
the layouts that the plan names, without the tables and lifetimes of `pricing`:

    tables' bytes at t == bytes at t made again <= memory line at t        for every moment t of the row

Moments of a step of n ops are numbered in this order:

    2 i            before op i
    2 i + 1        op i with its outputs
    3 n - 1 - i    the backward of op i
    3 n            the update
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.conversion import COLLECTIVES, is_copy
from autoddl.core.graph import RECEIVE, Graph, Kind
from autoddl.core.hubs import HUB
from autoddl.core.layout import Layout, Mesh, Split, local_shape
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of
from autoddl.core.stages import SEND
from autoddl.core.state_layouts import divide_steps, summed_layout
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.footprints.view_storages import is_moved, is_plain, is_reshape, moved_reads
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.optimizers import Optimizer, optimizer_of
from autoddl.schedule.buckets import has_collective
from autoddl.schedule.memory_line import predict_memory
from autoddl.schedule.memory_program import ParsedConversion, ParsedPlan

__all__ = ["bytes_at_moments", "check_row", "line_at_moments", "numbers_of"]

SAME = 1e-9
"""Bytes that differ by less, relatively, are equal."""


def numbers_of(graph: Graph, moment: str) -> tuple[int, ...]:
    """The numbers of a moment that is given by name, three of them for an `around`."""
    count = len(graph.ops)
    if moment == "update":
        return (3 * count,)
    kind, _, name = moment.partition(" ")
    i = next(i for i, op in enumerate(graph.ops) if op.name == name)
    places = {"before": (2 * i,), "forward": (2 * i + 1,), "backward": (3 * count - 1 - i,)}
    return places[kind] if kind in places else (2 * i, 2 * i + 1, 3 * count - 1 - i)


def check_row(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, row: Mapping[str, float],
              claimed: Mapping[str, float], codecs: Sequence[str] = ()) -> float:
    """The largest ratio of claimed bytes to the memory line over the moments of `row`.

    `claimed` are the bytes of each moment by the tables, `codecs` the messages that may be coded. An op without a
    backward has no point on the line: there the peak counts. Raises AssertionError where the tables claim other bytes
    than the layouts have, or more than the line.
    """
    again, line, worst = bytes_at_moments(plan, graph, optimizer, cluster, codecs), line_at_moments(
        plan, graph, optimizer, cluster), 0.0
    assert abs(sum(row.values()) - 1) <= SAME and min(row.values()) >= 0, "the weights of a row add up to one"
    for moment in row:
        numbers, nbytes = numbers_of(graph, moment), claimed[moment]
        found, most = max(again[n] for n in numbers), max(line[n] for n in numbers) or max(line)
        fits = nbytes <= found * (1 + SAME) if len(numbers) > 1 else abs(nbytes - found) <= SAME * found
        assert fits, f"the row of {moment!r} claims {nbytes:.0f} bytes, the layouts have {found:.0f}"
        assert nbytes <= most * (1 + SAME), f"the row of {moment!r} claims {nbytes:.0f} bytes, the line has {most:.0f}"
        worst = max(worst, nbytes / most)
    return worst


def line_at_moments(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> list[float]:
    """By moment, the most bytes of the memory line at its op, in the last microbatch and without buckets."""
    count = len(graph.ops)
    line = predict_memory(replace(plan, bucket_bytes=1), graph, optimizer, cluster).line
    found, before = defaultdict[int, float](float), -1
    for here, nbytes in line:
        if here < count <= before:  # the next microbatch begins
            found.clear()
        found[here] = max(found[here], nbytes)
        before = here
    forward = [found[i] for i in range(count) for _ in range(2)]
    return [*forward, *(found[here] for here in reversed(range(count, 2 * count))), found[2 * count]]


def bytes_at_moments(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, codecs: Sequence[str] = ()
                     ) -> list[float]:
    """By moment, the bytes of a rank under one plan, with each storage counted once.

    Each other microbatch in flight adds what it keeps between forward and backward, at all moments but the update's.
    """
    made = _Bytes(plan, graph, optimizer_of(optimizer), cluster.device.kind == "cpu", codecs)
    count, found = 3 * len(graph.ops) + 1, list[float]()
    change = [0.0] * (count + 1)
    for spans in made.spans.values():
        if len(spans) == 1:
            start, end, nbytes = spans[0]
            change[start], change[end + 1] = change[start] + nbytes, change[end + 1] - nbytes
            continue
        for n in range(min(s for s, _, _ in spans), max(e for _, e, _ in spans) + 1):
            nbytes = next((b for start, end, b in spans if start <= n <= end), 0.0)
            change[n], change[n + 1] = change[n] + nbytes, change[n + 1] - nbytes
    total, others = 0.0, (plan.in_flight - 1) * made.kept_between()
    for n in range(count):
        total += change[n]
        found.append(total + others * (n < count - 1))
    return found


class _Bytes:
    """Collects spans of moments with their bytes, by storage."""

    def __init__(self, plan: Plan, graph: Graph, optimizer: Optimizer, processor: bool, codecs: Sequence[str]) -> None:
        self.codecs, self.plan, self.graph, self.optimizer, self.count = codecs, plan, graph, optimizer, len(graph.ops)
        self.mesh, self.parsed, self.processor = plan.mesh, ParsedPlan(plan, graph, processor), processor
        self.flows, self.readers = graph.differentiable(), graph.consumers()
        self.views = [base(op) in VIEWS for op in graph.ops]
        decided, whole = plan.index().decisions, Layout.broadcast(plan.mesh)
        self.reads = [decided[op.name].inputs if op.name in decided else (whole,) * len(op.inputs) for op in graph.ops]
        self.writes = [decided[op.name].outputs if op.name in decided else (whole,) * len(op.outputs)
                       for op in graph.ops]
        self.whole = [self._footprint(i, None) for i in range(self.count)]
        self.local = [self._footprint(i, plan.mesh) for i in range(self.count)]
        self.again = {i: part for part in self.parsed.parts for i in part.ops}
        self.part_at = {i: part for part in self.parsed.parts for i in range(part.block.start, part.block.end)}
        self.spans, self.sparse = defaultdict[Hashable, list[tuple[int, int, float]]](list), plan.sparse_sums
        self.block = {i: one.name for one in blocks_of(graph) for i in range(one.start, one.end)}
        self.storages = self._shared_storages()
        self._everything()

    def kept_between(self) -> float:
        """Bytes that a microbatch keeps of its own from the last forward to the first backward."""
        last = 2 * self.count - 1
        alive = [next(((end, nbytes) for start, end, nbytes in spans if start <= last <= end), (last, 0.0))
                 for key, spans in self.spans.items() if key not in self.once]
        return sum(nbytes for end, nbytes in alive if end > last)

    def _footprint(self, i: int, mesh: Mesh | None) -> Footprint:
        """The footprint of op i on the shards of a rank, or on whole tensors without a mesh."""
        if self.views[i]:
            return Footprint()
        op, call, tensors = self.graph.ops[i], self.parsed.calls[i], self.graph.tensors
        shapes = [tensors[t].shape if mesh is None else local_shape(tensors[t].shape, at, mesh)
                  for t, at in zip(op.inputs, self.reads[i], strict=True)]
        values = tuple([Value(-1, shape, contiguous(shape), tensors[t].itemsize)
                        for shape, t in zip(shapes, op.inputs, strict=True)])
        if mesh is None:
            return footprint_of(LocalOp(op, values, tuple([tensors[t].shape for t in op.outputs]), call.itemsizes,
                                        call.needs, False, call.on_cpu))
        return footprint_of(replace(call, inputs=values))

    def add(self, start: int, end: int, nbytes: float, storage: Hashable = None) -> None:
        if start <= end and nbytes:
            self.spans[len(self.spans) if storage is None else storage].append((start, end, nbytes))

    def keep(self, start: int, i: int, nbytes: float) -> None:
        """Adds bytes from `start`, in forward, to the backward of op i; what runs again has them as its part does."""
        if i not in self.again:
            self.add(start, self.back(i), nbytes)
            return
        self.add(start, 2 * i + 1, nbytes)
        self.add(self.back(self.again[i].trigger), self.back(i), nbytes)

    def saved_input(self, i: int, k: int) -> None:
        """Input k of op i until its backward. Brought back, it is gone in between, unless a conversion copied it."""
        nbytes = self.read(i, k) * (k in self.local[i].saves)
        if not self.brought(i, k):
            self.keep(2 * i + 2, i, nbytes)
            return
        then = self.back(self.part_at[i].trigger)
        if self.copied(i, k):
            self.add(2 * i + 2, then - 1, self.read(i, k))
        self.add(then, self.back(i), nbytes)

    def brought(self, i: int, k: int) -> bool:
        """Whether op i, which does not run again, reads in input k what a part brings back, perhaps behind views."""
        if i in self.again or i not in self.part_at:
            return False
        writers, chain = self.graph.producers(), [self.graph.ops[i].inputs[k]]
        while (j := writers.get(chain[-1])) is not None and self.views[j] and j not in self.again:
            chain.append(self.graph.ops[j].inputs[0])
        return not set(chain).isdisjoint(self.part_at[i].noted)

    def back(self, i: int) -> int:
        """The moment of the backward of op i."""
        return 3 * self.count - 1 - i

    def piece(self, t: int, layout: Layout) -> float:
        """Bytes of a rank's piece of tensor t."""
        return float(prod(local_shape(self.graph.tensors[t].shape, layout, self.mesh)) * self.graph.tensors[t].itemsize)

    def read(self, i: int, k: int) -> float:
        return self.piece(self.graph.ops[i].inputs[k], self.reads[i][k])

    def written(self, i: int, n: int) -> float:
        return self.piece(self.graph.ops[i].outputs[n], self.writes[i][n])

    def yields(self, i: int) -> bool:
        """Whether a gradient comes to op i."""
        return any(o in self.flows for o in self.graph.ops[i].outputs)

    def savers(self, i: int, k: int) -> list[int]:
        """The ops whose backward reads input k of op i, perhaps behind views."""
        if not self.views[i]:
            return [i] * (k in self.whole[i].saves)
        return [s for o in self.graph.ops[i].outputs for at in self.readers[o] for s in self.savers(*at)]

    def converted(self, i: int, k: int) -> ParsedConversion | None:
        """The conversion of input k of op i if it sends."""
        found = self.parsed.edge(self.graph.ops[i], k)
        return found if found and any(step.kind in COLLECTIVES for step in found.forward) else None

    def copied(self, i: int, k: int) -> bool:
        """Whether the conversion of input k of op i makes a new tensor, as every slice of an intermediate tensor is."""
        found = self.parsed.edge(self.graph.ops[i], k)
        if found is None or self.graph.ops[i].inputs[k] not in self.parsed.intermediates:
            return bool(self.converted(i, k))
        return any(is_copy(step) for step in found.forward)

    def _everything(self) -> None:
        graph, dependent, end = self.graph, self.graph.dependent(), 3 * self.count
        for t, tensor in enumerate(graph.tensors):
            if tensor.kind is Kind.PARAMETER:
                self._parameter(t)
            elif tensor.kind in (Kind.INPUT, Kind.BUFFER, Kind.CONSTANT):
                times = self.plan.microbatches if tensor.kind is Kind.INPUT else 1
                self.add(0, end, float(tensor.nbytes * times))
        for i, op in enumerate(graph.ops):
            if op.target in (SEND, RECEIVE):  # on the way to another stage
                self.add(0, end - 1, self.read(i, 0) if op.inputs else self.written(i, 0))
        self.once = frozenset(self.spans)
        trained = [t for t, x in enumerate(graph.tensors) if x.kind is Kind.PARAMETER and t in self.flows]
        if trained and self.optimizer.is_adam:  # two temporaries of AdamW
            self.add(end, end, 2 * self._own(max(trained, key=lambda t: graph.tensors[t].nbytes)))
        for i, op in enumerate(graph.ops):
            if not self.views[i] and dependent.intersection(op.outputs):
                self._forward(i)
            if self.yields(i):
                self._backward(i)
        for part in self.parsed.parts:
            self._read_by(part, dependent)

    def _read_by(self, part: RecomputedPart, dependent: frozenset[int]) -> None:
        """Adds the tensors of other ops that a part reads: they stay until it has run again."""
        writers = self.graph.producers()
        for t in part.reads:
            i = writers.get(t)
            if i is None or t not in dependent:
                continue
            op = self.graph.ops[i]
            root = op.inputs[0] if op.target == HUB else t
            source = writers.get(root)
            if source is not None and not self.views[source]:
                start = max(self._free_from(t, i, part), self._free_from(root, source, part))
                self.add(start, self.back(part.trigger) - 1, self.written(i, op.outputs.index(t)),
                         ("read by a part", root))

    def _free_from(self, t: int, i: int, part: RecomputedPart) -> int:
        """From when on no other span counts the storage of tensor t, which op i writes."""
        savers = [s for at in self.readers[t] for s in self.savers(*at)]
        held = [2 * s + 1 if self.again.get(s) is part else self.back(s) for s in savers]
        if not self.views[i] and self.graph.ops[i].outputs.index(t) in self.whole[i].keeps:
            held.append(self.back(i))
        return max(held or [2 * self._last_reader(t) + 1]) + 1

    def _holder(self, savers: list[int]) -> int:
        """Who counts a storage: of the savers in the block of the first, the first that does not run again, if any."""
        near = [i for i in sorted(savers) if self.part_at.get(i) is self.part_at.get(min(savers))]
        return next((i for i in near if i not in self.again), near[0])

    def _last_reader(self, t: int) -> int:
        """The last op that reads tensor t, perhaps behind views."""
        found = [j for j, _ in self.readers[t]]
        behind = [self._last_reader(o) for j in found if self.views[j] for o in self.graph.ops[j].outputs]
        return max([*found, *behind], default=0)

    def _own(self, t: int) -> float:
        """Bytes that a rank stores of parameter t."""
        tensor = self.graph.tensors[t]
        layout = self._stored(tensor.fqn)
        return float(prod(local_shape(tensor.shape, layout, self.mesh)) * tensor.stored.itemsize) if layout else 0.0

    def _stored(self, fqn: str) -> Layout | None:
        return next((s.layout for s in self.plan.stored if s.fqn == fqn), None)

    def _parameter(self, t: int) -> None:
        tensor, end, m = self.graph.tensors[t], 3 * self.count, self.plan.microbatches
        stored = next((s for s in self.plan.stored if s.fqn == tensor.fqn), None)
        if stored is None:
            return
        if not self.readers[t]:
            self.add(0, end, float(tensor.nbytes))
            return
        trained = t in self.flows
        self.add(0, end, self._own(t) * (1 + self.optimizer.copies(tensor) * trained))
        self.add(end, end, self._own(t) * trained)
        if tensor.name in self.sparse:
            self.add(0, end, self.piece(t, stored.layout) * tensor.gradient.itemsize / tensor.itemsize)
        wide = tensor.gradient.itemsize / tensor.itemsize
        for j, k in self.readers[t]:
            self._gathered(j, k)
            if not (trained and self.yields(j)):
                continue
            edge = self.parsed.edge(self.graph.ops[j], k)
            assert edge is not None and edge.gradient is not None
            own, made = self.piece(t, stored.layout) * wide, self.piece(t, edge.gradient) * wide
            summed = summed_layout(stored.layout, edge.gradient, stored.depths)
            passes = self.graph.ops[j].target == HUB or self.views[j] or k in self.whole[j].passes
            if m > max(1, self.plan.in_flight):  # a forward comes behind the first backward
                each, last = divide_steps(edge.backward, edge.gradient, summed)
                between = self.piece(t, summed) * wide if has_collective(each) else made
                self.add(0, self.back(j), between if has_collective(last) else own)
            if m > 1 or not passes:
                codecs = codecs_of(self.codecs, "gradients", tensor.gradient.dtype)
                part = part_in_flight(codecs, tensor.gradient.itemsize)
                self.add(self.back(j) + 1, end - 1, part * min(own, made))

    def _gathered(self, j: int, k: int) -> None:
        """The copies of a parameter that op j reads: the one that is kept, and the one that is gathered from there."""
        t = self.graph.ops[j].inputs[k]
        edge = self.parsed.edges[self.graph.tensors[t].fqn]
        once, each = map(has_collective, divide_steps(edge.forward, edge.conversion.source, edge.kept))
        local = bool(edge.tensor.master) and not (once or each)
        read, weight = self.read(j, k), 0.0
        if once and each:
            weight = self.piece(t, edge.kept)
        elif once or local:
            weight = read
        savers = sorted(set(self.savers(j, k)))
        if self.plan.microbatches > 1:
            self.add(0, 2 * j - 1, weight)
        self.add(2 * j, 2 * j + 1, read * (once or each or local) + weight * (once and each))
        part = self.again.get(j)
        if part is not None and not self.views[j]:
            last = self.back(min(j, part.trigger)) if savers else self.back(part.trigger) - 1
            self.add(2 * j + 2, last, weight)
            self.add(self.back(part.trigger), last, read * each)
        elif savers == [j]:
            self.add(2 * j + 2, self.back(j), weight)
            self.add(self.back(j), self.back(j), read * each)
        elif savers:
            last = max(i for o in self.graph.ops[j].outputs for i, _ in self.readers[o])
            self.add(2 * j + 2, 2 * last - 1, weight)
            self._passed_on(j, 2 * last, weight, read * each)
        if self.graph.ops[j].target == HUB:
            for i, slot in self.readers[self.graph.ops[j].outputs[0]]:
                nbytes = self.read(i, slot) * bool(self.converted(i, slot))
                if not self.views[i] and slot in self.whole[i].saves:
                    self.keep(2 * i, i, nbytes)
                else:
                    self.add(2 * i, 2 * i + 1, nbytes)

    def _passed_on(self, j: int, start: int, kept: float, again: float) -> None:
        """A parameter's copy behind op j, a hub or a view, while the first op keeps it that none sends it to.

        A copy that is split on every axis is left out.
        """
        keepers = [] if j in self.again else [found for found in self._keepers(j) if found[0] not in self.again]
        if not keepers:
            return
        first, path = min(keepers)
        end, counts = self.back(first), self._some(self.reads[j][0], 1.0)
        self.add(start, end, kept * counts)
        self.add(end, end, again * counts)
        for i, k in path:
            t, edge = self.graph.ops[i].inputs[k], self.parsed.edge(self.graph.ops[i], k)
            source = edge.source if edge else self.reads[i][k]
            before = self._some(source, self.piece(t, source))
            if self.converted(i, k):
                self.add(start, end, -before)
            elif self.views[i]:
                self.add(start, end, self._some(self.reads[i][k], self.read(i, k)) - before)

    def _some(self, layout: Layout, nbytes: float) -> float:
        """The bytes, none of a layout that splits a tensor on every axis."""
        return 0.0 if all(isinstance(state, Split) for state in layout) else nbytes

    def _keepers(self, j: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """The ops that keep the input of op j, a hub or a view of all of it. Each comes with the reads on the way."""
        op, tensors, found = self.graph.ops[j], self.graph.tensors, []
        if len(op.inputs) != 1 or len(op.outputs) != 1:
            return []
        (t,) = op.outputs
        for i, k in self.readers[t] if tensors[t].nbytes == tensors[op.inputs[0]].nbytes else ():
            if self.views[i]:
                found += [(saver, ((i, k), *path)) for saver, path in self._keepers(i)]
            elif k in self.whole[i].saves:
                found.append((i, ((i, k),)))
        return found

    def _forward(self, i: int) -> None:
        local, now = self.local[i], 2 * i + 1
        self.keep(now, i, local.beside)
        self.add(now, now, local.during)
        self.add(now - 1, now - 1, local.before)
        for n, t in enumerate(self.graph.ops[i].outputs):
            if n in self.whole[i].keeps:
                self.keep(now, i, self.written(i, n) * (n in local.keeps))
                self._copied(t)
                self._moved(t)
            else:
                self._followed(t, now, self.written(i, n))

    def _followed(self, t: int, start: int, nbytes: float) -> None:
        """A storage of `nbytes` from `start` on, through views, to the first op that keeps it or the last reader."""
        keeping = [(self._holder(savers), *at) for at in self.readers[t] if (savers := self.savers(*at))]
        if not self.readers[t]:
            return
        hub = self.graph.producers()[t]
        if self.graph.ops[hub].target == HUB and hub not in self.part_at and len(self._keeping_reads(hub)) > 1:
            self._kept_by_several(self._keeping_reads(hub), start, nbytes)
            return
        holder = self._holder([saver for saver, _, _ in keeping]) if keeping else None
        i, k = min((i, k) for saver, i, k in keeping if saver == holder) if keeping else max(self.readers[t])
        self.add(start, 2 * i - 1, nbytes)
        op = self.graph.ops[i]
        if not self.views[i]:
            self.add(2 * i, 2 * i + 1, self.read(i, k))
            if keeping:
                self.saved_input(i, k)
        elif len(op.outputs) > 1:
            for n, o in enumerate(op.outputs):
                self._followed(o, 2 * i, self.written(i, n))
            self._rest(i)
        else:
            first = self.read(i, 0)
            through = first if base(op) == "aten.expand" else min(first, self.written(i, 0))
            self._followed(op.outputs[0], 2 * i, through)
            self._rest(i)
        for j, slot in self.readers[t]:
            if (j, slot) != (i, k) and not self.views[j] and slot in self.whole[j].saves:
                self._kept_copy(j, slot)

    def _keeping_reads(self, hub: int) -> list[tuple[int, int]]:
        """The reads of a hub's tensor that backward needs; none where they are in several blocks."""
        reads = sorted((i, k) for i, k in self.readers[self.graph.ops[hub].outputs[0]]
                       if not self.views[i] and k in self.whole[i].saves)
        blocks = {self.block.get(i) for i in (hub, *(i for i, _ in reads))}
        return reads if len(blocks) == 1 else []

    def _kept_by_several(self, reads: list[tuple[int, int]], start: int, nbytes: float) -> None:
        """A hub's tensor that several ops keep: as it is until backward comes to the last, if any reads it so."""
        (first, k), (last, _), t = reads[0], reads[-1], self.graph.ops[reads[0][0]].inputs[reads[0][1]]
        written = self.writes[self.graph.producers()[t]][0]
        as_it_is = any(self.reads[i][slot] == written for i, slot in reads)
        self.add(start, 2 * last - 1, nbytes)
        self.add(2 * last, self.back(last), nbytes * as_it_is)
        copy, other = self.copied(first, k), self.reads[first][k] != written
        self.add(2 * first, 2 * last - 1, self.read(first, k) * copy)
        self.add(2 * last, self.back(last), self.read(first, k) * (copy or (other and not as_it_is)))
        self.add(self.back(last) + 1, self.back(first), self.read(first, k) * (k in self.local[first].saves))
        for i, slot in reads[1:]:
            self.add(2 * i, self.back(i), self.read(i, slot) * self.copied(i, slot))

    def _rest(self, c: int) -> None:
        """Adds what lives on of a storage of which view c shows a part that one op keeps, and parts that none keeps."""
        op, tensors = self.graph.ops[c], self.graph.tensors
        kept = [n for n, o in enumerate(op.outputs) if any(self.savers(*at) for at in self.readers[o])]
        if len(kept) != 1 or self._is_expanded(op.inputs[0]):
            return
        ratio = prod(tensors[op.inputs[0]].shape) / prod(tensors[op.outputs[kept[0]]].shape)
        if ratio > 1:
            last = [self._last_reader(o) for n, o in enumerate(op.outputs) if n != kept[0]]
            nbytes = min(max(self.read(c, 0) - self.written(c, kept[0]), 0.0), (ratio - 1) * self.written(c, kept[0]))
            self._while_shown(c, self._way(op.outputs[kept[0]]), max([2 * c, *(2 * i + 2 for i in last)]), nbytes,
                              ratio - 1)

    def _moved(self, t: int) -> None:
        """Copies by reshapes behind a permutation of an output that its op keeps too."""
        for i, _ in self.readers[t]:
            if self.views[i] and len(self.graph.ops[i].outputs) == 1:
                (o,) = self.graph.ops[i].outputs
                order = moved_reads(self.graph, self.processor).get(i)
                if order is None:
                    self._moved(o)
                elif way := self._way(o, True):
                    reads, writes = (local_shape(self.graph.tensors[t].shape, at, self.mesh)
                                     for t, at in ((self.graph.ops[i].inputs[0], self.reads[i][0]),
                                                   (o, self.writes[i][0])))
                    nbytes = self.written(i, 0) * is_moved(reads, order, writes)
                    self._while_shown(i, way, 2 * way[-1][0] + 1, nbytes, 1.0)

    def _while_shown(self, c: int, way: list[tuple[int, int]], start: int, nbytes: float, share: float) -> None:
        """Bytes behind view c until the backward of the op at the end of `way`, less those that an edge frees."""
        if not way or len({self.block.get(i) for i in (c, *(i for i, _ in way))}) > 1:
            return
        saver, k = way[-1]
        spans = [(start, self.back(saver))]
        if saver in self.again or self.brought(saver, k):
            spans = [(start, 2 * saver + 1), (self.back(self.part_at[saver].trigger), self.back(saver))]
        for begin, end in spans:
            self.add(begin, end, nbytes)
            for i, slot in way:
                if self.copied(i, slot):
                    edge = self.parsed.edge(self.graph.ops[i], slot)
                    assert edge is not None
                    self.add(begin, end, -share * self.piece(self.graph.ops[i].inputs[slot], edge.source))

    def _way(self, t: int, row_major: bool = False) -> list[tuple[int, int]]:
        """The reads from tensor t, perhaps row-major, to the only op that keeps it, if no view between ever copies."""
        keeping = [at for at in self.readers[t] if self.savers(*at)]
        if len(keeping) != 1:
            return []
        (i, k), = keeping
        if not self.views[i]:
            return [(i, k)]
        op = self.graph.ops[i]
        stays = row_major and is_reshape(op, self.graph)
        alone = len(op.inputs) == len(op.outputs) == 1
        behind = self._way(op.outputs[0], stays) if alone and (stays or is_plain(op, self.graph)) else []
        return [(i, k), *behind] if behind else []

    def _is_expanded(self, t: int) -> bool:
        """Whether tensor t shows elements of its storage several times."""
        i = self.graph.producers().get(t)
        if i is None or not self.views[i]:
            return False
        (before, *_), tensors = self.graph.ops[i].inputs, self.graph.tensors
        return prod(tensors[t].shape) > prod(tensors[before].shape) or self._is_expanded(before)

    def _copied(self, t: int) -> None:
        """Copies that readers keep of an output that its op keeps too."""
        for i, k in self.readers[t]:
            if self.views[i]:
                for o in self.graph.ops[i].outputs:
                    self._copied(o)
            elif k in self.whole[i].saves:
                self._kept_copy(i, k)

    def _kept_copy(self, i: int, k: int) -> None:
        if self.copied(i, k):
            self.keep(2 * i + 1, i, self.read(i, k))

    def _backward(self, i: int) -> None:
        op, now, local = self.graph.ops[i], self.back(i), self.local[i]
        if not self.views[i] and self.flows.intersection(op.inputs):
            n = next(n for n, o in enumerate(op.outputs) if o in self.flows)
            self.add(now, now, self.written(i, n), self.storages.find(("given", op.outputs[n])))
            self.add(now, now, local.back)
            for k in self.parsed.calls[i].needs:
                if k not in local.passes:
                    itemsize = self.graph.tensors[op.inputs[k]].itemsize
                    shape = local_shape(self.graph.tensors[op.inputs[k]].shape, self.reads[i][k], self.mesh)
                    whole = self.parsed.calls[i].outputs[0] if local.output_shaped else shape
                    self.add(now, now, float(prod(whole) * itemsize))
        if op.target == HUB and op.inputs[0] in self.flows and not self._is_parameter(op.inputs[0]):
            readers = [j for j, _ in self.readers[op.outputs[0]] if self.yields(j)]
            layout = self.plan.index().decisions[op.name].gradient
            if len(readers) > 1 and layout is not None:
                waits, first, second = self.piece(op.outputs[0], layout), self.back(readers[-1]), self.back(readers[-2])
                self.add(first + 1, second, waits, self.storages.find(("waits", op.outputs[0])))
                self.add(second + 1, now - 1, waits)

    def _shared_storages(self) -> "_Storages":
        """Which gradients may be one storage: views, hubs and ops that pass their gradient on as it is."""
        found, writers = _Storages(), self.graph.producers()
        for i, op in enumerate(self.graph.ops):
            if not self.yields(i):
                continue
            if op.target == HUB or self.views[i]:
                for o in op.outputs:
                    found.join(("given", op.inputs[0]), ("given", o))
                continue
            for t in (op.inputs[k] for k in self.whole[i].passes):
                if t not in self.flows or self._is_parameter(t):
                    continue
                readers, hub = [j for j, _ in self.readers[t] if self.yields(j)], writers.get(t)
                if hub is None or self.graph.ops[hub].target != HUB or len(readers) < 2:
                    found.join(("given", t), ("given", op.outputs[0]))
                elif readers[-1] == i:
                    found.join(("waits", t), ("given", op.outputs[0]))
        return found

    def _is_parameter(self, t: int) -> bool:
        return self.graph.tensors[t].kind is Kind.PARAMETER


class _Storages:
    """Names of gradients that may be one storage."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, name: Hashable) -> Hashable:
        while name in self.parent:
            name = self.parent[name]
        return name

    def join(self, one: Hashable, other: Hashable) -> None:
        if self.find(one) != self.find(other):
            self.parent[self.find(one)] = self.find(other)
