"""Finds the dims of an operator without a rule along which it may be split, by trying its calls on pieces.

For a set of dims, one of some inputs and one of every output, all of one size, the operator splits along it where

    f(pieces of the inputs) = pieces of f(inputs)        and so do its gradients

An input that is whole adds its gradients up over the pieces. Each set is tried on 2 and on 3 ranks, with two draws of
values. Its sizes are even, odd and prime, none is that of another dim, and its own is tried too where that is small.
What holds for all is a name of a dimension string (`rules.dimension_strings`). It must also hold beside each of the
other names, one on each of two axes. Partial sums are not tried.

Calls are small: the sizes of the graph are made smaller as far as the operator takes them. Not tried are operators that
draw, write, or return what they read, and those whose equal calls differ. An operator has `SECONDS` of the processor,
and a call of it as long a time.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from math import prod
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from autoddl.core.graph import Tensor as Entry
from autoddl.core.layout import Mesh
from autoddl.operators.rules.dimension_strings import signatures
from autoddl.operators.rules.writing import rule_text
from autoddl.operators.trials.cases import Case, fill, listed, recorded
from autoddl.operators.trials.trial import check, option

__all__ = ["SECONDS", "Call", "Probed", "probe"]

Shapes = tuple[tuple[int, ...], ...]
Dims = tuple[int | None, ...]
"""For every tensor the dim that is split, None where it is whole."""

SECONDS = 0.2
"""Seconds of the processor for an operator, and seconds that one call may take."""
SMALL = 8
"""Sizes up to this stay as they are."""
SIZES = (12, 16, 18, 20, 8, 24)
"""Sizes that larger ones become, each another."""
APART = ((6, 10, 14, 22), (5, 9, 15, 21), (7, 11, 13, 17))
"""Sizes of the dims that are split: even, odd and prime ones, coprime where no other dim has them."""
ELEMENTS = 2**18
"""The most elements of a call."""
SETS = 64
"""The most sets of dims of one size."""
EXACT, ROUNDED = 1e-9, 1e-4
"""Relative errors of rounding in float64 and in float32."""


WRITES, ALIASES = "it writes into its arguments", "it returns what it reads"


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a graph has it.

        fn         what is called
        target     its name in a graph
        args       positional arguments, with `Hole(k)` for input k
        kwargs     the others
        inputs     the input tensors
        outputs    the output tensors
    """

    fn: Any
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """The dimension string that was found, empty without a dim that splits, and why no more was tried."""

    text: str
    reason: str = ""


class _Stopped(Exception):
    """Says why trying ends."""


def probe(call: Call, seconds: float = SECONDS) -> Probed:
    """Tries a call for at most `seconds` of the processor; never raises what the operator raises."""
    reason = _untriable(call)
    if reason:
        return Probed("", reason)
    trial = _Trial(call, process_time() + seconds)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            trial.run()
        except _Stopped as stopped:
            return Probed(trial.text, str(stopped))
        except Exception as error:  # of the operator, which may raise anything on a piece
            return Probed("", f"it fails on small tensors: {type(error).__name__}")
    return Probed(trial.text, "" if trial.text else "no dim splits")


def _untriable(call: Call) -> str:
    """Why an operator must not be tried, empty where it may."""
    if isinstance(call.fn, torch._ops.OpOverload):
        schema = call.fn._schema
        if torch.Tag.nondeterministic_seeded in call.fn.tags:
            return "it draws random numbers"
        if schema.is_mutable:
            return WRITES
        if any(returned.alias_info for returned in schema.returns):
            return ALIASES
    if not any(t.numel > 1 for t in call.inputs):
        return "it reads no tensor that can be split"
    if any(t.dtype.startswith("complex") for t in (*call.inputs, *call.outputs)):
        return "it computes with complex numbers"
    return ""


@dataclass
class _Trial:
    """The trial of one call.

        call      what is tried
        end       when it ends, on the clock of `process_time`
        text      the dimension string that it has found so far
        names     the dims of every name of it
        draws     two draws of values, of which the call makes numbers
        small     shapes of the inputs in trials
        dtypes    dtypes of the inputs in trials
    """

    call: Call
    end: float
    text: str = ""
    names: list[tuple[Dims, Dims]] = field(default_factory=list)
    draws: tuple[int, int] = (0, 1)
    small: Shapes = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def run(self) -> None:
        self.dtypes, self.small = self.fitting()
        self.check_repeatable()
        for size in self.sizes():
            self.one_of(size)

    def fitting(self) -> tuple[tuple[torch.dtype, ...], Shapes]:
        """Dtypes and the smallest shapes in which the call runs, float64 where the operator computes in it."""
        own = tuple(getattr(torch, t.dtype) for t in self.call.inputs)
        wide = tuple(torch.float64 if d.is_floating_point else d for d in own)
        failed: Exception | None = None
        for shapes in self.smaller():
            for dtypes in dict.fromkeys((wide, own)):
                try:
                    self.case(shapes, dtypes, 0)
                    return dtypes, shapes
                except (_Stopped, KeyboardInterrupt):
                    raise
                except Exception as error:
                    failed = failed or error
        raise _Stopped("it is too large to be tried" if failed is None else
                       f"it fails on small tensors: {type(failed).__name__}")

    def smaller(self) -> Iterator[Shapes]:
        """The shapes of the call with sizes made smaller: all, all but one, all but two."""
        shapes = tuple(t.shape for t in self.call.inputs)
        sizes = [n for n in dict.fromkeys(n for shape in shapes for n in shape) if n > SMALL]
        for count in range(min(len(sizes), 3) + 1):
            for kept in combinations(sizes, count):
                new = dict(zip([n for n in sizes if n not in kept], SIZES, strict=False))
                found = tuple(tuple(new.get(n, n) for n in shape) for shape in shapes)
                if sum(map(prod, found)) <= ELEMENTS:
                    yield found

    def case(self, shapes: Shapes, dtypes: Sequence[torch.dtype], draw: int) -> Case:
        """The call on tensors of these shapes. Raises `_Stopped` where it takes too long."""
        if process_time() > self.end:
            raise _Stopped("its time was over")
        took: list[float] = []
        while len(took) < 2:  # a machine may be busy once
            values, began = _values(shapes, dtypes, draw), perf_counter()
            made = recorded(self.call.fn, self.call.target, fill(self.call.args, values),
                            fill(dict(self.call.kwargs), values))
            took.append(perf_counter() - began)
            if took[-1] <= SECONDS:
                return made
        raise _Stopped(f"a small call of it takes {min(took):.1f} s")

    def check_repeatable(self) -> None:
        """Raises `_Stopped` where equal calls differ, or results show nothing: where all is one number, or none is."""
        dull = [True] * len(self.call.outputs)
        if not all(bool(y.isfinite().all()) for y in self.results(0)):
            self.draws = (1, 2)
        for draw in self.draws:
            first, second = self.results(draw), self.results(draw)
            if len(first) != len(dull) or not all(map(_equal, first, second)):
                raise _Stopped("equal calls of it differ")
            if not all(bool(y.isfinite().all()) for y in first):
                raise _Stopped("it makes no numbers of normal values, and of others between 0 and 1")
            dull = [before and bool((y == y.reshape(-1)[:1]).all()) for before, y in zip(dull, first, strict=True)]
        if any(dull):
            raise _Stopped("its results show nothing: one of them has the same number everywhere")

    def results(self, draw: int) -> list[Tensor]:
        """Runs the small call. Raises `_Stopped` where it writes into its arguments, or returns one."""
        made, fresh = self.case(self.small, self.dtypes, draw), _values(self.small, self.dtypes, draw)
        found = listed(made.fn(*fill(made.args, made.values), **fill(made.kwargs, made.values)))
        if not all(map(torch.equal, made.values, fresh)):
            raise _Stopped(WRITES)
        if {y.untyped_storage().data_ptr() for y in found} & {x.untyped_storage().data_ptr() for x in made.values}:
            raise _Stopped(ALIASES)
        return found

    def sizes(self) -> list[int]:
        """The sizes of dims of the call, that of the first dim first."""
        return [n for n in dict.fromkeys(n for t in self.call.inputs for n in t.shape) if n > 1]

    def one_of(self, size: int) -> None:
        """Adds the names of the dims of one size."""
        taken = {(k, d) for one in self.names for k, d in enumerate((*one[0], *one[1])) if d is not None}
        for number, (read, made) in enumerate(self.sets(size)):
            places = {(k, d) for k, d in enumerate((*read, *made)) if d is not None}
            if number == SETS:
                return
            if not places & taken and self.holds(read, made, size) and self.fits(read, made):
                taken |= places
                self.names.append((read, made))
                self.text = _written(self.call, self.names)

    def sets(self, size: int) -> Iterator[tuple[Dims, Dims]]:
        """Dims of one size, one of some inputs and one of every output; first those of most inputs."""
        every = [[d for d, n in enumerate(t.shape) if n == size] for t in (*self.call.inputs, *self.call.outputs)]
        count = len(self.call.inputs)
        reads = sorted(product(*([*dims, None] for dims in every[:count])), key=lambda dims: dims.count(None))
        for read in reads:
            if any(d is not None for d in read):
                yield from ((read, made) for made in product(*every[count:]))

    def holds(self, read: Dims, made: Dims, size: int) -> bool:
        """Whether pieces along these dims give pieces, for every size, number of ranks and draw of values."""
        text = _written(self.call, [(read, made)])
        others = {n for shape, d in zip(self.small, read, strict=True) for k, n in enumerate(shape) if k != d}
        even, odd, prime = (next(n for n in several if n not in others) for several in APART)
        for n, ranks in ((even, 2), (odd, 2), (prime, 3), (size, 2)):
            shapes = tuple(tuple(n if k == d else m for k, m in enumerate(shape))
                           for shape, d in zip(self.small, read, strict=True))
            if sum(map(prod, shapes)) > ELEMENTS:
                continue
            for draw in self.draws:
                if not self.agrees(shapes, draw, text, Mesh.parse(f"a={ranks}")):
                    return False
        return self.holds_in_full(text)

    def holds_in_full(self, text: str) -> bool:
        """Whether it holds in the sizes of the graph, where these are small."""
        shapes = tuple(t.shape for t in self.call.inputs)
        return sum(map(prod, shapes)) > ELEMENTS or self.agrees(shapes, self.draws[0], text, Mesh.parse("a=2"))

    def fits(self, read: Dims, made: Dims) -> bool:
        """Whether a new name holds together with each of the others, one on each axis."""
        text = _written(self.call, [*self.names, (read, made)])
        return not self.names or self.agrees(self.small, 1, text, Mesh.parse("a=2,b=2"))

    def agrees(self, shapes: Shapes, draw: int, text: str, mesh: Mesh) -> bool:
        """Whether all layouts that a text allows, of different names on the axes, give what one process gives."""
        try:
            made = self.case(shapes, self.dtypes, draw)
            tensors = (*made.inputs, *made.outputs)
            every = [one for one in signatures(text, tuple(t.shape for t in tensors)) if one.split]
            wide = all(t.dtype == "float64" or not t.is_floating for t in tensors)
            tried = [option(one) for one in permutations(every, len(mesh.axes))]
            return bool(tried) and not any(check(made, one, mesh, EXACT if wide else ROUNDED) for one in tried)
        except _Stopped:
            raise
        except Exception:
            return False


def _values(shapes: Shapes, dtypes: Sequence[torch.dtype], draw: int) -> list[Tensor]:
    """Values to try: normal ones at draw 0, else some between 0 and 1; whole numbers 0 and 1."""
    generator = torch.Generator().manual_seed(11 + draw)
    found = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if dtype.is_floating_point:
            law = torch.rand if draw else torch.randn
            found.append(law(shape, dtype=torch.float64, generator=generator).to(dtype))
        else:
            found.append(torch.randint(2, shape, generator=generator).to(dtype))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _written(call: Call, names: Sequence[tuple[Dims, Dims]]) -> str:
    """The dimension string in which name k stands at its dims."""
    rows = [["."] * len(t.shape) for t in (*call.inputs, *call.outputs)]
    for k, (read, made) in enumerate(names):
        for row, d in zip(rows, (*read, *made), strict=True):
            if d is not None:
                row[d] = f"n{k}"
    return rule_text(rows[:len(call.inputs)], rows[len(call.inputs):])
