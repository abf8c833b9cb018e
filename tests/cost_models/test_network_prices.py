"""Networks are counted as published: ten prices and the shares of two patterns; prices are checked as they are read."""

import pytest
from shell import LAPTOP, shell

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Level
from autoddl.cost_models.network_prices import NETWORKS, PRICES, Bill, bill, grid, level_of, prices_of, shares
from autoddl.cost_models.topologies import check_topology

PUBLISHED = {  # million dollars for about 1,000 and 16,000 devices (Hoefler et al. 2022, table 2)
    "fat tree": (25.3, 680), "HyperX": (10.8, 448), "HammingMesh, 2 x 2": (5.4, 224), "HammingMesh, 4 x 4": (2.7, 43.3),
    "torus": (2.5, 39.5)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_prices_to_the_printed_digit(name: str) -> None:
    for ports, published in zip((1024, 16384), PUBLISHED[name], strict=True):
        found = bill(name, ports)
        assert isinstance(found, Bill)
        digits = 0 if published in (680, 448, 224) else 1
        assert round(found.dollars() / 1e6, digits) == published


def test_a_tree_of_two_levels_by_hand() -> None:
    # 42 ports down and 22 up: 25 first switches, 550 cables up to 9 others
    assert bill("fat tree, half up", 1024) == Bill(16, 34, 1024, 550)
    assert bill("fat tree", 64, 1) == Bill(1, 1, 64, 0)


def test_half_a_fat_tree_costs_less_and_reaches_half() -> None:
    for ports in (128, 1024, 8192):
        whole, half, quarter = (bill(name, ports) for name in list(NETWORKS)[:3])
        assert isinstance(whole, Bill) and isinstance(half, Bill) and isinstance(quarter, Bill)
        assert whole.dollars() > half.dollars() > quarter.dollars()
        assert shares("fat tree, half up", ports) == (0.5, 0.5)


@pytest.mark.parametrize(("name", "ports", "published"), [  # the paper's cut bound; 2 a^2 x^2 devices
    ("HammingMesh, 2 x 2", 1024, 0.266), ("HammingMesh, 4 x 4", 1024, 0.143), ("HyperX", 256, 0.531)])
def test_the_share_of_an_all_to_all_is_the_published_one(name: str, ports: int, published: float) -> None:
    found = shares(name, ports)
    assert found is not None
    assert found[1] == pytest.approx(published, abs=0.003)
    assert found[0] == 1.0


def test_every_level_that_is_made_is_one_of_a_cluster_file() -> None:
    for name in NETWORKS:
        for size in (16, 48, 64, 1024):
            made = level_of(name, Level("net", size, 50e9, 1e-6, shared_by="node", protocol="roce"))
            if made is not None:
                check_topology(made)
                assert (made.size, made.bandwidth, made.shared_by) == (size, 50e9, "node")


def test_what_cannot_be_built_says_why() -> None:
    assert bill("torus", 1022) == "1022 ports are no boards of 2 x 2"
    assert "three levels" in str(bill("fat tree", 2_000_000))
    assert grid(6, 2) is None and grid(24, 2) == (4, 6)
    with pytest.raises(InputError, match="'mesh' is no network"):
        bill("mesh", 64)
    with pytest.raises(InputError, match="at least two ports"):
        bill("torus", 1)


@pytest.mark.parametrize(("written", "said"), [
    ({"ports": 64, "switch": 1, "copper": 1}, "has no optical"),
    ({"ports": 64, "switch": 1, "copper": 1, "optical": 1, "gold": 2}, "has gold, which is no price"),
    ({"ports": 64, "switch": -1, "copper": 1, "optical": 1}, "switch: -1 is no price"),
    ({"ports": 63, "switch": 1, "copper": 1, "optical": 1}, "no multiple of 4"), ([], "has no ports")])
def test_a_table_without_a_price_is_one_line(written: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        prices_of(written, "prices.yaml")


def test_the_shell_tables_them() -> None:
    said = shell("network", LAPTOP, "--cost")
    assert said.code == 0 and "dollars" in said.out and f"{PRICES.switch:,.0f}" in said.out
    assert shell("network", LAPTOP, "--prices", "no.yaml").code == 2
    assert "--model" in shell("network", LAPTOP).err


def test_one_board_is_no_torus_and_a_deadline_has_its_unit() -> None:
    assert bill("torus", 4) == "one board has nothing to join"
    said = shell("network", LAPTOP, "--cost", "--plan", "plan.json", "--deadline", "0.6")
    assert said.code == 2 and "0.6" in said.err
