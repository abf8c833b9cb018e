"""Every mesh over a cluster once: all ordered factorisations, no axis across a part of a level."""

from math import prod

import pytest

from autoddl.core.errors import InputError
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.meshes import check_mesh, meshes

HEAD = "name: test\ndevice: H100-80GB\nlevels:\n"


def cluster(**sizes: int) -> Cluster:
    """Levels innermost first."""
    levels = [f"  - {{name: {name}, size: {size}, bandwidth: {100 // 2 ** i} GB/s, latency: 5 us}}\n"
              for i, (name, size) in enumerate(sizes.items())]
    return parse_cluster(HEAD + "".join(levels), "test")


def names(place: Cluster, most: int = 3) -> set[str]:
    return {str(mesh) for mesh in meshes(place, most)}


def test_all_meshes_of_two_levels() -> None:
    assert names(cluster(node=2, net=4), 3) == {
        "net-node=8", "net=4,node=2", "net.1=2,net.0=2,node=2"}
    assert names(cluster(node=4, net=2), 2) == {"net-node=8", "net=2,node=4"}


@pytest.mark.parametrize(("sizes", "three", "four"), [
    ({"node": 8, "net": 8}, 6, 12), ({"node": 8, "rack": 16, "hall": 8}, 8, 17),
    ({"node": 8, "rack": 32, "hall": 16}, 9, 22)])
def test_how_many_there_are(sizes: dict[str, int], three: int, four: int) -> None:
    place = cluster(**sizes)
    assert len(meshes(place, 3)) == three
    assert len(meshes(place, 4)) == four


@pytest.mark.parametrize("sizes", [{"node": 8, "net": 8}, {"node": 4, "rack": 4, "hall": 4}, {"node": 6, "net": 5},
                                   {"node": 7}, {"node": 1, "net": 4}])
def test_every_mesh_covers_the_cluster_and_straddles_nothing(sizes: dict[str, int]) -> None:
    place = cluster(**sizes)
    found = meshes(place, 4)
    assert len(set(found)) == len(found) == len({(m.sizes, m.strides) for m in found})
    for mesh in found:
        assert prod(mesh.sizes) == place.size
        assert check_mesh(mesh, place) is mesh
    assert [len(m.axes) for m in found] == sorted(len(m.axes) for m in found)


def test_one_device_and_a_prime_number_of_them() -> None:
    assert names(cluster(node=1)) == {"one=1"}
    assert names(cluster(node=7)) == {"node=7"}
    assert names(cluster(node=6, net=5)) == {
        "net-node=30", "net=5,node=6", "net=5,node.1=2,node.0=3", "net=5,node.1=3,node.0=2"}


def test_an_axis_across_part_of_a_level_is_refused() -> None:
    with pytest.raises(InputError, match="straddles levels"):
        check_mesh(Mesh.parse("a=2,b=16,c=2"), cluster(node=8, net=8))
    with pytest.raises(InputError, match="must multiply to 64"):
        check_mesh(Mesh.parse("a=8,b=4"), cluster(node=8, net=8))
