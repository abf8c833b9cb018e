"""Residuals of sparse sums (`core.sparse`) in a checkpoint: saved by rank, and read under the same plan or another.

    residuals.PLAN.RANK.N.NAME.values        what rank RANK has not sent yet of parameter NAME, in its N-th program
    residuals.PLAN.RANK.N.NAME.velocity      its velocity, where the rule has momentum
    residuals.PLAN.RANK.N.NAME.place         by dim (offset, size) of that piece; then (whether the piece counts, 0)
    residuals.PLAN.RANK.N.NAME.thresholds    of the sum that NAME is the first member of: own, common, steps, bounds

PLAN is the plan's fingerprint. Under the same plan every rank gets back what it had, to the bit. Under another one the
first rank of each sum gets the sum of all pieces that count. Of ranks with the same piece the first counts. Steps
count on, so that a warm-up goes on; thresholds are computed in the next step that needs them. So are those of another
bucket, which a former version has saved: their bounds do not fit. A plan without sparse
sums leaves residuals where they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoddl.core.layout import B, Extent, extents
from autoddl.runtime.collectives.sparse_sum import SparseSum

if TYPE_CHECKING:
    from autoddl.runtime.collectives.process_groups import Groups
    from autoddl.runtime.parallel_model import ParallelModel
    from autoddl.runtime.parameters import StoredParameter

__all__ = ["residual_state", "restore_residuals", "wanted_residuals"]

PART = "residuals"

KEPT = ("values", "velocity")
"""What a rank keeps of a gradient: the residual, and the velocity."""


class _Piece(NamedTuple):
    """A member's part of a residual: its key, its tensors by KEPT, where it lies, and whether it counts in sums."""

    key: str
    name: str
    kept: Mapping[str, Tensor]
    place: tuple[Extent, ...]
    counts: bool


class _Sum(NamedTuple):
    """A sparse sum of this rank: its state, its members, and whether the rank is the first of it."""

    state: SparseSum
    pieces: tuple[_Piece, ...]
    first: bool


def _sums(model: "ParallelModel") -> Iterator[_Sum]:
    """Every sparse sum of this rank; N counts the programs of the rank."""
    mine = ""
    for n, runner in enumerate(model.runners()):
        for members, move in runner.store.reducer.sparse_sums():
            assert move.sparse is not None
            mine = mine or f"{PART}.{model.plan.fingerprint()}.{model.groups.rank}"
            at, axes = runner.groups.coordinate, move.axes
            parts = move.sparse.parts([one.leaf.shape for one in members])
            kept = (dict(zip(KEPT, two[:move.sparse.rule.copies], strict=False)) for two in parts)
            pieces = tuple(_piece(f"{mine}.{n}", member, values, runner.groups, axes)
                           for member, values in zip(members, kept, strict=True))
            yield _Sum(move.sparse, pieces, all(at[a] == 0 for a in axes))


def _piece(key: str, member: "StoredParameter", kept: Mapping[str, Tensor], groups: "Groups", axes: tuple[int, ...]
           ) -> _Piece:
    name, at = member.tensor.fqn, groups.coordinate
    place = extents(member.tensor.shape, member.layout, groups.mesh, at)
    counts = all(at[a] == 0 for a, state in enumerate(member.layout) if state == B and a not in axes)
    return _Piece(f"{key}.{name}", name, kept, place, counts)


def residual_state(model: "ParallelModel") -> dict[str, Tensor]:
    """The residuals of this rank by key; none without sparse sums. The values are the model's own."""
    found: dict[str, Tensor] = {}
    for one in _sums(model):
        for piece in one.pieces:
            found |= {f"{piece.key}.{what}": values for what, values in piece.kept.items()}
            found[f"{piece.key}.place"] = torch.tensor([*piece.place, (int(piece.counts), 0)])
        state = one.state
        found[f"{one.pieces[0].key}.thresholds"] = torch.tensor(
            [state.own, state.common, float(state.steps), *map(float, state.bounds)], dtype=torch.float64)
    return found


def wanted_residuals(model: "ParallelModel", saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors to read of a checkpoint that has `saved`, by key, still without values."""
    found: dict[str, Tensor] = {}
    for one in _sums(model):
        if f"{one.pieces[0].key}.thresholds" in saved:
            keys = {f"{piece.key}.{what}" for piece in one.pieces for what in (*piece.kept, "place")}
            keys.add(f"{one.pieces[0].key}.thresholds")
        else:
            keys = {key for piece in one.pieces for key in _of(piece.name, saved)} if one.first else set()
            keys.update(_counted(saved))
        found |= {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype) for key in keys}
    return found


def _counted(saved: Iterable[str]) -> list[str]:
    """The key of thresholds that says how many steps ran before: the first, the same on all ranks; none without."""
    return sorted(key for key in saved if key.startswith(f"{PART}.") and key.endswith(".thresholds"))[:1]


def _of(name: str, saved: Mapping[str, Any]) -> list[str]:
    """The keys of all pieces of a parameter."""
    ends = tuple(f".{name}.{what}" for what in (*KEPT, "place"))
    return [key for key in saved if key.startswith(f"{PART}.") and key.endswith(ends)
            and key.split(".", 4)[4].rpartition(".")[0] == name]


def restore_residuals(model: "ParallelModel", read: Mapping[str, Tensor]) -> None:
    """Sets the residuals by what was `read` of `wanted_residuals`; those of which nothing was saved become 0."""
    before = max((int(read[key][2]) for key in _counted(read)), default=0)
    for one in _sums(model):
        state, key = one.state, f"{one.pieces[0].key}.thresholds"
        if key in read:
            for piece in one.pieces:
                for what, values in piece.kept.items():
                    values.copy_(read[f"{piece.key}.{what}"])
            state.own, state.common, steps, *bounds = read[key].tolist()
            whole = [*bounds, state.residual.numel()]
            fits = len(whole) == state.ranks and whole == sorted(whole)
            state.steps, state.bounds = int(steps), [int(bound) for bound in bounds] if fits else []
            continue
        state.residual.zero_()
        state.velocity.zero_()
        state.own, state.common, state.steps, state.bounds = 0.0, 0.0, before, []
        for piece in one.pieces if one.first else ():
            for name in _of(piece.name, read):
                place, _, what = name.rpartition(".")
                if what in piece.kept:
                    _add(piece, piece.kept[what], read[name], read[f"{place}.place"].tolist())


def _add(piece: _Piece, into: Tensor, values: Tensor, place: Sequence[Sequence[int]]) -> None:
    """Adds what a saved piece, if it counts, and this one have in common."""
    *there, (counts, _) = place
    for dim, ((start, size), (other, length)) in enumerate(zip(piece.place, there, strict=True)):
        first, last = max(start, other), min(start + size, other + length)
        if last <= first or not counts:
            return
        into, values = into.narrow(dim, first - start, last - first), values.narrow(dim, first - other, last - first)
    into.add_(values)
