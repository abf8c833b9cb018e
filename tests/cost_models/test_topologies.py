"""What topologies leave of their ports: against hand-computed shares, a search of the link graph, published tables."""

from itertools import pairwise
from statistics import fmean

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Group, Level, collective, load_device, parse_cluster
from autoddl.cost_models.backends import BACKENDS
from autoddl.cost_models.call import CollectiveCall
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.machine import TOPOLOGIES
from autoddl.cost_models.topologies import CUBE_MESH_RINGS, PATTERNS, check_topology, hops, slowdown

Links = dict[frozenset[int], int]


def level(topology: str, size: int, **keys: object) -> Level:
    return Level("net", size, 1e9, 0.0, topology=topology, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("some", "ways", "step", "expected"), [  # expected: ring, all-to-all, send
    (level("switch", 8), 8, 1, (1, 1, 1)),
    (level("switch", 8, oversubscription=2), 4, 2, (2, 2, 2)),
    # leaves of 4, trunks half as wide: one hop in 4 leaves, 12 of 15 peers are outside, a send may leave or not
    (level("fat-tree", 16, oversubscription=2, leaf=4), 16, 1, (1, 2 * 12 / 15, 1)),
    (level("fat-tree", 16, oversubscription=2, leaf=4), 4, 1, (1, 1, 1)),
    (level("fat-tree", 16, oversubscription=2, leaf=4), 4, 4, (2, 2, 2)),
    (level("dragonfly", 16, leaf=4), 16, 1, (1, 1.5 * 12 / 15, 1)),
    (level("dragonfly", 16, leaf=4), 4, 1, (1, 1, 1)),
    # 7 links, of which a pair sees 1 and a group of 4 sees 3
    (level("fully-connected", 8), 8, 1, (1, 1, 7)),
    (level("fully-connected", 8), 2, 1, (7, 7, 7)),
    (level("fully-connected", 8), 4, 2, (7 / 3, 7 / 3, 7)),
    # 6 links: 1 between the first two, 4 rings among the first four, 6 among all
    (level("hybrid-cube-mesh", 8), 2, 1, (6, 6, 6)),
    (level("hybrid-cube-mesh", 8), 4, 1, (1.5, 1.5, 6)),
    (level("hybrid-cube-mesh", 8), 8, 1, (1, 1, 6)),
    # both ways round; mean distance 8/4; half of it is a line; every second is a ring of 4 that two groups share
    (level("ring", 8), 8, 1, (1, 2 * 8 / 7, 2)),
    (level("ring", 8), 4, 1, (2, 2 * 1 * 4 / 3, 2)),
    (level("ring", 8), 4, 2, (2, 2 * 1 * 4 / 3, 4)),
    (level("ring", 2), 2, 1, (1, 1, 1)),
    # 4 x 4: a row has 2 of 4 links; the whole is bound by 4/4 hops in each of 2 dims; 4 x 4 x 4 by 3 dims
    (level("torus", 16, dims=(4, 4)), 16, 1, (1, 2 * 1 * 16 / 15, 4)),
    (level("torus", 16, dims=(4, 4)), 4, 1, (2, 2 * 1 * 4 / 3, 4)),
    (level("torus", 16, dims=(4, 4)), 4, 4, (2, 2 * 1 * 4 / 3, 4)),
    (level("torus", 64, dims=(4, 4, 4)), 64, 1, (1, 3 * 1 * 64 / 63, 6)),
    # boards of 2 x 2, p1 = 2/4, p2 = 1/4: 2 (2/4 + 1/2); one board: the bisection of its mesh
    (level("hammingmesh", 16, dims=(2, 2), board=2), 16, 1, (1, 2, 4)),
    (level("hammingmesh", 16, dims=(2, 2), board=2), 4, 1, (1, 2, 4)),
])
def test_shares_of_the_port(some: Level, ways: int, step: int, expected: tuple[float, float, float]) -> None:
    assert [slowdown(some, ways, step, pattern) for pattern in PATTERNS] == pytest.approx(list(expected))


def test_every_topology_has_a_row_and_every_pattern_a_name() -> None:
    keys = {"hammingmesh": {"dims": (1, 2), "board": 2}}
    for topology in TOPOLOGIES:
        assert slowdown(level(topology, 8, **keys.get(topology, {})), 8, 1, "ring") == 1
    with pytest.raises(InputError, match="'gossip' is no pattern of traffic"):
        slowdown(level("switch", 8), 8, 1, "gossip")


def test_messages_pass_more_links_in_a_torus() -> None:
    assert hops(level("torus", 64, dims=(8, 8)), 64, 1) == 4
    assert hops(level("torus", 64, dims=(8, 8)), 8, 1) == 2
    assert hops(level("switch", 64), 64, 1) == 1


def _cycles(n: int, links: Links) -> list[list[frozenset[int]]]:
    """Hamiltonian cycles over 0 .. n-1, each once per direction."""
    found: list[list[frozenset[int]]] = []
    paths: list[tuple[int, ...]] = [(0,)]
    while paths:
        path = paths.pop()
        if len(path) == n:
            found.append([frozenset(pair) for pair in pairwise((*path, 0))])
        paths += [(*path, v) for v in range(1, n) if v not in path and links.get(frozenset((path[-1], v)), 0)]
    return [cycle for cycle in found if all(link in links for link in cycle)]


def _packed(cycles: list[list[frozenset[int]]], links: Links) -> int:
    """The most cycles that share no link."""
    best = 0
    for i, cycle in enumerate(cycles):
        if all(links[link] for link in cycle):
            best = max(best, 1 + _packed(cycles[i:], {link: n - (link in cycle) for link, n in links.items()}))
    return best


@pytest.mark.parametrize("n", [3, 4, 6, 7, 8])
def test_rings_of_the_cube_mesh_are_those_of_its_link_graph(n: int) -> None:
    ones = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    twos = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    links = {frozenset(pair): count for pairs, count in ((ones, 1), (twos, 2)) for pair in pairs}
    assert 2 * _packed(_cycles(n, links), links) == CUBE_MESH_RINGS[n]
    assert _cycles(5, links) == []


def test_measured_bandwidths_of_groups_win() -> None:
    measured = level("hybrid-cube-mesh", 8, group_bandwidth=((2, 0.25e9), (5, 0.4e9)))
    assert [slowdown(measured, ways, 1, "ring") for ways in (2, 5, 8)] == [4, 2.5, 1]
    assert slowdown(measured, 5, 1, "send") == 4


def test_what_was_measured_in_a_group_is_what_it_gets() -> None:
    whole = level("switch", 8, group_bandwidth=((8, 0.5e9),))
    call = CollectiveCall(BACKENDS["nccl"], "all-gather", crossings(_cluster(whole), Group(((8, 1),))), 1e9)
    crossing = call.crossings[0]
    assert call.seconds(crossing, crossing.port_load("ring") * 0.5e9) == pytest.approx(1.0, rel=0.01)


def test_a_large_cube_mesh_needs_the_bandwidth_of_every_group() -> None:
    with pytest.raises(InputError, match="among 4, 8, 16"):
        check_topology(level("hybrid-cube-mesh", 16, group_bandwidth=((2, 0.25e9),)))


@pytest.mark.parametrize(("board", "side", "percent"), [(2, 16, 26.6), (4, 8, 14.3)])
def test_hamming_mesh_all_to_all_of_a_thousand_accelerators(board: int, side: int, percent: float) -> None:
    """1/(a (2 p2 + p1)), as a fraction of injection (Hoefler et al., SC 2022)."""
    mesh = level("hammingmesh", board**2 * side**2, dims=(side, side), board=board)
    assert 100 / slowdown(mesh, mesh.size, 1, "all-to-all") == pytest.approx(percent, abs=0.5)
    call = CollectiveCall(BACKENDS["gloo"], "all-to-all", crossings(_cluster(mesh), Group(((mesh.size, 1),))), 1e9)
    crossing = call.crossings[0]
    assert 100 / crossing.port_load("all-to-all") == pytest.approx(percent, abs=0.5)


def _cluster(*levels: Level) -> Cluster:
    return Cluster("test", load_device("A100-40GB"), levels, "nccl")


def test_topologies_of_a_thousand_accelerators_as_simulated() -> None:
    """All-to-all and all-reduce as fractions of injection (HammingMesh, SC 2022, about 1,000 accelerators)."""
    table = [
        (level("fat-tree", 1024), 0.999, 0.989), (level("fat-tree", 1024, oversubscription=2, leaf=32), 0.512, 0.989),
        (level("fat-tree", 1024, oversubscription=4, leaf=32), 0.257, 0.989),
        (level("dragonfly", 1024, leaf=128), 0.629, 0.988),
        (level("hammingmesh", 1024, dims=(16, 16), board=2), 0.254, 0.983),
        (level("hammingmesh", 1024, dims=(8, 8), board=4), 0.113, 0.984),
        (level("torus", 1024, dims=(32, 32)), 0.020, 0.981),
    ]
    differences = [abs(1 / slowdown(some, 1024, 1, pattern) - measured) for some, *both in table
                   for pattern, measured in zip(("all-to-all", "ring"), both, strict=True)]
    assert fmean(differences) <= 0.05 and max(differences) <= 0.15


SHARES = {  # communication / iteration; two A100-PCIe and one port per node, 4 and 8 GPUs: TCP, IPoIB, RDMA
    "T5-Large": (737e6, {4: (0.83, 0.74, 0.42), 8: (0.90, 0.78, 0.47)}),
    "GPT-2-Medium": (355e6, {4: (0.86, 0.78, 0.48), 8: (0.92, 0.84, 0.54)}),
}


def test_protocols_explain_the_communication_shares_of_one_another() -> None:
    """Compute as the RDMA column leaves it; the other columns follow from one efficiency per protocol."""
    differences = []
    for parameters, scales in SHARES.values():
        for ranks, (tcp, ipoib, rdma) in scales.items():
            compute = _gradients(parameters, ranks, "InfiniBand-EDR", "rdma-host") * (1 - rdma) / rdma
            for link, protocol, measured in (("Ethernet-10G", "tcp", tcp), ("InfiniBand-EDR", "ipoib", ipoib)):
                seconds = _gradients(parameters, ranks, link, protocol)
                differences.append(abs(seconds / (seconds + compute) - measured))
    assert len(differences) == 8 and fmean(differences) <= 0.05


def _gradients(parameters: float, ranks: int, link: str, protocol: str) -> float:
    cluster = parse_cluster(f"""
name: pairs
device: A100-40GB
levels:
  - {{name: node, size: 2, link: PCIe4}}
  - {{name: net, size: 4, link: {link}, protocol: {protocol}, shared_by: node}}
""", "pairs")
    return collective(cluster, "all-reduce", Group(((ranks, 1),)), 2 * parameters).seconds
