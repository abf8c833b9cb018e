"""Compares the pieces of an option, run in one process, with the whole call, forward and backward.

    check(case, option, mesh) -> what is wrong, () if nothing is

Inputs are cut by their layouts, a partial sum into random terms that add up to it. The local call is the one that
`kernels.lower` makes, and outputs are put together by theirs. A random upstream gradient is cut by the duals of the
layouts of the outputs. What local autograd yields for input k is put together by `gradient(option, k)`. Ranks are
threads where a kernel reduces by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from autoddl.core.layout import B, Layout, Mesh, P
from autoddl.operators.kernels.custom_ops import BY_VALUES
from autoddl.operators.kernels.site import Exchange, Reduce, Shift, Site
from autoddl.operators.kernels.table import lower
from autoddl.operators.rules.dimension_strings import Signature
from autoddl.operators.rules.table import Option, backward
from autoddl.operators.trials.cases import Case, fill, listed
from autoddl.operators.trials.pieces import Coordinate, coordinates, cut, error_of

__all__ = ["check", "dual", "gradient", "option"]

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Truth:
    """Outputs of the whole call; a random upstream gradient of each (None: no gradient); gradients of the inputs."""

    outputs: tuple[Tensor, ...]
    upstream: Gradients
    inputs: Gradients


@lru_cache(maxsize=1000)
def _truth(case: Case) -> Truth:
    inputs = _leaves(case, case.values)
    outputs = listed(case.fn(*fill(case.args, inputs), **fill(case.kwargs, inputs)))
    generator = torch.Generator().manual_seed(7)
    upstream = tuple(torch.randn(y.shape, dtype=y.dtype, generator=generator) if y.requires_grad else None
                     for y in outputs)
    return Truth(tuple(y.detach() for y in outputs), upstream, _gradients(outputs, inputs, upstream))


def _leaves(case: Case, values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().clone().requires_grad_(case.differentiable(k)) for k, value in enumerate(values)]


def gradient(option: Option, k: int) -> Layout:
    """Layout of d(input k) that the local backward yields."""
    return option.gradients[k]


def dual(layout: Layout) -> Layout:
    """Layout of the gradient that the local backward of a tensor's producer needs."""
    return Layout(tuple(B if part == P else part for part in layout))


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Gradients) -> Gradients:
    """d(sum of outputs * upstream) / d(input), None for inputs that are not floating or not used."""
    pairs = [(y, g) for y, g in zip(outputs, upstream, strict=True) if g is not None and y.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not pairs or not leaves:
        return (None,) * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def option(signatures: Signature | Sequence[Signature]) -> Option:
    """The option with one signature per mesh axis."""
    chosen = (signatures,) if isinstance(signatures, Signature) else tuple(signatures)
    columns = [Layout(states) for states in zip(*((*s.inputs, *s.outputs) for s in chosen), strict=True)]
    count = len(chosen[0].inputs)
    inputs, outputs = tuple(columns[:count]), tuple(columns[count:])
    return Option(chosen, inputs, outputs, backward(inputs, outputs))


class _Threads:
    """An all-reduce, an all-to-all and a shift among threads, one per rank, all of which call it in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self.slots: dict[Coordinate, Tensor] = {}
        self.sent: dict[Coordinate, tuple[Tensor, ...]] = {}
        self.barrier = Barrier(mesh.size, timeout=20)

    def reduce(self, at: Coordinate) -> Reduce:
        def reduce(value: Tensor, kind: str, axes: tuple[int, ...]) -> Tensor:
            self.slots[at] = value.detach().clone()
            self.barrier.wait()
            group = [v for other, v in sorted(self.slots.items()) if all(
                other[a] == at[a] for a in range(len(at)) if a not in axes)]
            self.barrier.wait()
            stacked = torch.stack(group)
            return stacked.amax(0) if kind == "max" else stacked.sum(0)
        return reduce

    def exchange(self, at: Coordinate, mesh: Mesh) -> Exchange:
        """An all-to-all of rows: of every member's, the part that it sends to `at`."""
        def exchange(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], axes: tuple[int, ...],
                     nbytes: int) -> Tensor:
            self.sent[at] = rows.detach().clone().split(sent)
            self.barrier.wait()
            members = mesh.members(axes, at)
            found = [self.sent[one][members.index(at)] for one in members]
            self.barrier.wait()
            assert tuple(map(len, found)) == received
            return torch.cat(found)
        return exchange


    def shift(self, at: Coordinate, mesh: Mesh) -> Shift:
        """Gives what the member before sends; it is there at once."""
        def shift(value: Tensor, axes: tuple[int, ...], number: int) -> Callable[[], Tensor]:
            self.slots[at] = value.detach().clone()
            self.barrier.wait()
            members = mesh.members(axes, at)
            found = self.slots[members[members.index(at) - 1]].clone()
            self.barrier.wait()
            return lambda: found
        return shift


def _no_reduce(value: Tensor, kind: str, axes: tuple[int, ...]) -> Tensor:
    raise AssertionError("a kernel reduces over axes although its signature is not marked 'inner'")


def check(case: Case, chosen: Signature | Option, mesh: Mesh, tolerance: float = 1e-10) -> tuple[str, ...]:
    """Lists what is wrong with `chosen` for this call: differences from the whole, shapes that do not fit."""
    picked = option(chosen) if isinstance(chosen, Signature) else chosen
    truth, ranks = _truth(case), coordinates(mesh)
    inputs = [cut(value, layout, mesh) for value, layout in zip(case.values, picked.inputs, strict=True)]
    upstream = [None if g is None else cut(g, dual(layout), mesh)
                for g, layout in zip(truth.upstream, picked.outputs, strict=True)]
    threads = _Threads(mesh)

    def run(at: Coordinate) -> tuple[list[Tensor], Gradients]:
        site = Site(case.op, case.inputs, case.outputs, picked, mesh, at,
                    threads.reduce(at) if picked.inner else _no_reduce, exchange=threads.exchange(at, mesh),
                    shift=threads.shift(at, mesh), swap=threads.exchange(at, mesh))
        try:
            return _local(case, site, [piece[at] for piece in inputs], [None if g is None else g[at] for g in upstream])
        except BaseException:
            threads.barrier.abort()
            raise

    try:
        _rehearse(case, picked, mesh)
        results = dict(zip(ranks, _every(run, ranks, bool(picked.inner)), strict=True))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return (f"{case}: {picked} on {mesh} fails: {error}",)
    return tuple(_differences(case, picked, mesh, truth, results, tolerance))


def _every(run: Callable[[Coordinate], Any], ranks: list[Coordinate], threaded: bool) -> list[Any]:
    if not threaded:
        return [run(at) for at in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def _local(case: Case, site: Site, pieces: list[Tensor], upstream: Sequence[Tensor | None]
           ) -> tuple[list[Tensor], Gradients]:
    """One rank: the outputs of its call and the gradients of its pieces."""
    leaves = _leaves(case, pieces)
    fn, args, kwargs = lower(site, case.fn, case.args, case.kwargs)
    outputs = listed(fn(*fill(args, leaves), **fill(kwargs, leaves)))
    for k, out in enumerate(outputs):
        if tuple(out.shape) != site.output_shape(k):
            raise ValueError(f"output {k} has shape {tuple(out.shape)}, its layout says {site.output_shape(k)}")
    grads = _gradients(outputs, leaves, tuple(upstream))
    return [y.detach() for y in outputs], tuple(
        torch.zeros_like(x) if g is None and x.requires_grad else g for g, x in zip(grads, leaves, strict=True))


def _rehearse(case: Case, picked: Option, mesh: Mesh) -> None:
    """The local calls on tensors without data: native kernels check less than that, and may crash on wrong shapes.

    Our own kernels that take sizes from values, or many steps, have no part in this."""
    if case.op.target in BY_VALUES:
        return
    seen = set()
    for at in coordinates(mesh):
        site = Site(case.op, case.inputs, case.outputs, picked, mesh, at, lambda value, kind, axes: value)
        shapes = tuple(site.input_shape(k) for k in range(len(case.values)))
        if shapes not in seen:
            seen.add(shapes)
            empty = [torch.empty(s, dtype=v.dtype, device="meta") for s, v in zip(shapes, case.values, strict=True)]
            fn, args, kwargs = lower(site, case.fn, case.args, case.kwargs)
            try:
                fn(*fill(args, empty), **fill(kwargs, empty))
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error).lower():
                    raise


def _differences(case: Case, picked: Option, mesh: Mesh, truth: Truth, results: dict[Coordinate, Any],
                 tolerance: float) -> Iterator[str]:
    for k, (whole, layout) in enumerate(zip(truth.outputs, picked.outputs, strict=True)):
        error = error_of({at: outputs[k] for at, (outputs, _) in results.items()}, whole, layout, mesh)
        if not error <= tolerance:
            yield f"{case}: {picked} on {mesh}: output {k} differs by {error:.1e}"
    for k, wanted in enumerate(truth.inputs):
        if wanted is not None:
            pieces = {at: grads[k] for at, (_, grads) in results.items()}
            error = error_of(pieces, wanted, gradient(picked, k), mesh)
            if not error <= tolerance:
                yield f"{case}: {picked} on {mesh}: gradient of input {k} differs by {error:.1e}"
