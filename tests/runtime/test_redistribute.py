"""Every conversion gives the pieces that one device would cut, forward and backward, and sends what it is priced at."""

from itertools import product
from typing import Any

import pytest
import torch
from ranks import on_ranks
from sampling import parametrize_or_slow

from autoddl.core.conversion import COLLECTIVES, Step, group_size, payload
from autoddl.core.layout import B, Layout, Mesh, P, Split, extents
from autoddl.core.layout_codes import legal_layouts
from autoddl.pricing.routes import Routes, routes
from autoddl.runtime.collectives.packing import packing_of
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.redistribute import ExecutedCollective, Move, Recorder, Route, make_moves

Shape = tuple[int, ...]


def price(step: Step, nbytes: int, touched: int) -> float:
    return 1.0 + nbytes * 1e-3 if step.kind in COLLECTIVES else 1e-3


def whole(shape: Shape, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def piece(tensor: torch.Tensor, layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> torch.Tensor:
    """What the rank at `at` holds of `tensor`; partial sums are made of random parts."""
    axes = [a for a, state in enumerate(layout) if state == P]
    places = list(product(*(range(mesh.sizes[a]) for a in axes)))
    mine = places.index(tuple(at[a] for a in axes))
    parts = [whole(tuple(tensor.shape), 7 + i) for i in range(1, len(places))]
    part = parts[mine - 1] if mine else tensor - sum(parts, torch.zeros_like(tensor))
    for dim, (offset, size) in enumerate(extents(tuple(tensor.shape), layout, mesh, at)):
        part = part.narrow(dim, offset, size)
    return part.clone()


def check(pieces: list[torch.Tensor], tensor: torch.Tensor, layout: Layout, mesh: Mesh, text: str) -> None:
    """Partial sums add up, and everyone holds its piece."""
    free = [a for a, state in enumerate(layout) if state == P]
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, local in enumerate(pieces):
        key = tuple(0 if a in free else c for a, c in enumerate(mesh.coordinate(rank)))
        sums[key] = sums[key] + local if key in sums else local
    for at, total in sums.items():
        plain = Layout(tuple(B if state == P else state for state in layout))
        assert torch.equal(total, piece(tensor, plain, mesh, at)), f"{text} at {at}"


def subsets(mesh: Mesh) -> list[tuple[int, ...]]:
    n = len(mesh.axes)
    return [tuple(a for a in range(n) if bits >> a & 1) for bits in range(1, 2**n)]


def gradient_layouts(mesh: Mesh, source: Layout, target: Layout, seed: int) -> tuple[Layout, Layout]:
    """Layouts of a gradient that has the local shapes of target and source: B may be B or P where it arrives."""
    arrives = Layout(tuple(s if isinstance(s, Split) else B if s == P or mesh.sizes[a] == 1 or (seed >> a) % 2 else P
                           for a, s in enumerate(target)))
    return arrives, Layout(tuple(B if s == P else s for s in source))


Case = tuple[Layout, tuple[Step, ...], Layout, Layout, tuple[Step, ...]]


def run_cases(mesh: Mesh, shape: Shape, cases: list[Case], cluster: str | None = None
              ) -> list[tuple[torch.Tensor, torch.Tensor, list[ExecutedCollective]]]:
    groups, found = Groups(mesh, subsets(mesh), cluster=cluster), []
    for source, forward, _, arrives, backward in cases:
        x = piece(whole(shape), source, mesh, groups.coordinate).requires_grad_()
        recorder = Recorder()
        y = Route(make_moves(forward, [shape], [source], groups, recorder),
                  make_moves(backward, [shape], [arrives], groups, recorder, "backward"))(x)
        y.backward(piece(whole(shape, 3), arrives, mesh, groups.coordinate))
        assert x.grad is not None
        found.append((y.detach(), x.grad, recorder.executed))
    return found


def priced(steps: tuple[Step, ...], start: Layout, shape: Shape, mesh: Mesh, at: tuple[int, ...], direction: str
           ) -> list[ExecutedCollective]:
    found, here = [], start
    for step in steps:
        if step.kind in COLLECTIVES and group_size(step, mesh) > 1:
            names = "+".join(mesh.names[a] for a in step.axes)
            found.append(ExecutedCollective(direction, step.kind, names, payload(step, shape, 8, here, mesh, at)))
        here = step.after(here)
    return found


def cases_of(shape: Shape, mesh: Mesh, stride: int) -> list[Case]:
    table: Routes = routes(shape, 8, mesh, price)
    found: list[Case] = []
    for number, (source, target) in enumerate(product(table.layouts, repeat=2)):
        if number % stride == 0:
            arrives, wanted = gradient_layouts(mesh, source, target, number)
            found.append((source, table.steps(source, target), target, arrives, table.steps(arrives, wanted)))
    return found


@pytest.mark.ranks
@parametrize_or_slow("mesh,shape,stride", [
    ("a=4", (7, 4, 10), 1), ("a=3", (7, 5), 1), ("a=2,b=2", (8, 4), 3), ("a=2,b=2", (7, 11), 3),
    ("a=2,b=2", (5, 2, 7), 10), ("a=2,b=2,c=1", (6, 7), 29), ("a=1,b=2,c=2", (9, 4), 31)], [
    ("a=4", (8, 4), 1), ("a=2,b=2", (8, 4), 1), ("a=2,b=2", (7, 11), 1), ("a=2,b=2", (5, 2, 7), 3)])
def test_every_pair_of_layouts(mesh: str, shape: Shape, stride: int) -> None:
    _check(Mesh.parse(mesh), shape, stride)


SLOW = """name: slow
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}
levels:
  - {name: node, size: %d, bandwidth: 100 kB/s, latency: 1 us}
  - {name: net, size: %d, bandwidth: 1 kB/s, latency: 1 us, shared_by: node}
"""
"""Links so slow that collectives of our own pay at any size."""


@pytest.mark.ranks
@parametrize_or_slow("mesh,shape,stride,nodes", [
    ("a=4", (7, 4), 1, 2), ("a=3", (7, 5), 1, 3), ("a=2,b=2", (7, 11), 7, 2)], [
    ("a=2,b=2", (8, 4), 2, 2), ("a=2,b=2", (7, 11), 3, 2)])
def test_every_pair_of_layouts_by_messages(mesh: str, shape: Shape, stride: int, nodes: int) -> None:
    parsed = Mesh.parse(mesh)
    _check(parsed, shape, stride, SLOW % (parsed.size // nodes, nodes))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(13, 11), (8, 16)])
def test_eight_ranks(shape: Shape) -> None:
    _check(Mesh.parse("a=2,b=2,c=2"), shape, 1)


def _check(mesh: Mesh, shape: Shape, stride: int, cluster: str | None = None) -> None:
    cases = cases_of(shape, mesh, stride)
    results = on_ranks(mesh.size, run_cases, mesh, shape, cases, cluster)
    for number, (source, forward, target, arrives, backward) in enumerate(cases):
        text = f"{source} => {target} by {[s.text(mesh) for s in forward]}"
        check([r[number][0] for r in results], whole(shape), target, mesh, text)
        _, wanted = gradient_layouts(mesh, source, target, 0)
        check([r[number][1] for r in results], whole(shape, 3), wanted, mesh, f"gradient of {text}")
        for rank, result in enumerate(results):
            at = mesh.coordinate(rank)
            expected = priced(forward, source, shape, mesh, at, "forward")
            assert result[number][2] == expected + priced(backward, arrives, shape, mesh, at, "backward"), text


SHAPES = ((7, 4), (5, 9), (4, 1, 6))


def run_coalesced(groups: Groups, step: Step, layout: Layout, dtype: torch.dtype) -> list[Any]:
    mesh, recorder, text = groups.mesh, Recorder(), f"{dtype} {layout} {step.text(groups.mesh)}"
    tensors = [piece(whole(shape), layout, mesh, groups.coordinate).to(dtype) for shape in SHAPES]
    after = Move(step, SHAPES, [layout] * 3, groups, recorder).run(tensors)
    later = Move(step, SHAPES, [layout] * 3, groups).start(tensors).wait()
    assert all(torch.equal(a, b) for a, b in zip(after, later, strict=True)), text
    itemsize = tensors[0].element_size()
    total = sum(payload(step, shape, itemsize, layout, mesh, groups.coordinate) for shape in SHAPES)
    assert [e.nbytes for e in recorder.executed] == ([total] if step.kind in COLLECTIVES else []), text
    return [t.double() for t in after]


Coalesced = tuple[Layout, Step, torch.dtype]


def run_all_coalesced(mesh: Mesh, cases: list[Coalesced]) -> list[list[torch.Tensor]]:
    groups = Groups(mesh, subsets(mesh))
    return [run_coalesced(groups, step, layout, dtype) for layout, step, dtype in cases]


@pytest.mark.ranks
def test_one_collective_for_several_tensors() -> None:
    mesh = Mesh.parse("a=2,b=2")
    steps = (Step((0, 1), P, Split(0)), Step((0, 1), Split(0), B), Step((0, 1), P, B), Step((1,), Split(0), B),
             Step((0,), P, Split(0)), Step((1,), Split(0), P), Step((1,), B, Split(0)))
    cases: list[Coalesced] = [
        (layout, step, dtype) for layout in legal_layouts((9, 9), mesh) for step in steps
        if step.is_legal(layout) and not any(s == Split(1) for s in layout)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64)]
    results = on_ranks(4, run_all_coalesced, mesh, cases)
    for number, (layout, step, dtype) in enumerate(cases):
        for i, shape in enumerate(SHAPES):
            text = f"{dtype} {layout} {step.text(mesh)}"
            check([r[number][i] for r in results], whole(shape), step.after(layout), mesh, text)


def run_bools(mesh: Mesh) -> torch.Tensor:
    groups = Groups(mesh, subsets(mesh))
    local = piece(whole((7, 5)), Layout((Split(0),)), mesh, groups.coordinate) > 0
    across = Move(Step((0,), Split(0), Split(1)), [(7, 5)], [Layout((Split(0),))], groups).run([local])
    (found,) = Move(Step((0,), Split(1), B), [(7, 5)], [Layout((Split(1),))], groups).run(across)
    return found


@pytest.mark.ranks
def test_bools_travel_as_bytes() -> None:
    for found in on_ranks(4, run_bools, Mesh.parse("a=4")):
        assert torch.equal(found, whole((7, 5)) > 0)


def run_sparse(mesh: Mesh) -> str:
    with pytest.raises(RuntimeError) as error:
        groups = Groups(mesh, subsets(mesh))
        Move(Step((0,), P, B), [(4, 4)], [Layout((P,))], groups).run([torch.eye(4).to_sparse()])
    return type(error.value).__name__


@pytest.mark.ranks
def test_an_error_of_ones_own_is_not_a_peers() -> None:
    assert "MachineError" not in on_ranks(2, run_sparse, Mesh.parse("a=2"))


def test_what_is_joined_does_not_keep_the_buffer_of_others() -> None:
    """One row of each rank: as a view it would keep the blocks of all tensors that travelled with it."""
    mesh = Mesh.parse("net=4")
    packing = packing_of(Step.parse("net: S(0)->B", mesh), (4, 6), Layout.parse("S(0)"), mesh, (1,))
    buffer = whole((4, 100))
    joined = packing.unpack(buffer[:, 10:16].view(4, 1, 6))
    assert torch.equal(joined, buffer[:, 10:16]) and joined.untyped_storage().nbytes() == joined.nbytes


def _sliced() -> list[int]:
    """Bytes of the storages behind a slice of an intermediate tensor, and of a parameter."""
    mesh = Mesh.parse("all=2")
    groups, x = Groups(mesh, [(0,)]), torch.arange(48, dtype=torch.float64).view(8, 6)
    steps = [Step((0,), B, Split(1))]
    found = []
    for copies in (True, False):
        (move,) = make_moves(steps, [(8, 6)], [Layout((B,))], groups, copies=copies)
        (piece,) = move.run([x])
        assert torch.equal(piece, x.narrow(1, 3 * groups.coordinate[0], 3))
        found.append(piece.untyped_storage().nbytes())
    return found


@pytest.mark.ranks
def test_a_slice_of_an_intermediate_tensor_keeps_nothing_of_the_rest() -> None:
    assert on_ranks(2, _sliced) == [[8 * 3 * 8, 8 * 6 * 8]] * 2
