"""Software profiles: what they change of a device, and what is said where one is not known."""

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Level, load_device, parse_cluster
from autoddl.cost_models.software import SOFTWARE, attention_slowdown, run_by, software_named, software_rows

PLACE = Cluster("one", load_device("H100-80GB"), (Level("node", 8, 450e9, 3e-6),), "nccl")


@pytest.mark.parametrize("name", list(SOFTWARE))
def test_a_cluster_that_runs_a_profile_reads_back_and_is_the_same_machine(name: str) -> None:
    place = run_by(PLACE, software_named(name))
    assert parse_cluster(place.to_yaml(), "again") == place
    assert place.device.compiled == SOFTWARE[name].fuses and place.device.by_hand == SOFTWARE[name].by_hand
    if SOFTWARE[name].attention in ("best", "products"):
        assert place.device.kernels == PLACE.device.kernels or SOFTWARE[name].fuses


def test_older_attention_is_slower_on_newer_devices() -> None:
    old = SOFTWARE["eager"]
    assert attention_slowdown(old, "H100-80GB") == pytest.approx(1.744) and attention_slowdown(old, "A100-80GB") == 1
    assert run_by(PLACE, old).device.efficiency_of("attention") == pytest.approx(0.62 / 1.744)
    early, later = (attention_slowdown(SOFTWARE[name], "H100-80GB") for name in ("nemo-early-2024", "nemo"))
    assert early == pytest.approx(1.6 * later) and later == 1.09
    assert attention_slowdown(SOFTWARE["nemo"], "B200-180GB") == 1, "whose best is what cuDNN reaches there"


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'eager'"):
        software_named("eagre")
    with pytest.raises(InputError, match="there is no software 'xyz'; there are eager, "):
        software_named("xyz")


def test_a_profile_like_another_has_its_fields_but_for_its_own() -> None:
    rows: dict[str, dict[str, object]] = {"one": {"host": 1.0, "update": 2}, "two": {"like": "one", "update": 3},
                                          "three": {"like": "two"}}
    assert software_rows(rows)["three"] == software_rows(rows)["two"] == {"host": 1.0, "update": 3}
    for unknown in ("tow", "four", ""):
        with pytest.raises(InputError, match=f"the profile 'four' is like '{unknown}', which is no profile above it"):
            software_rows({**rows, "four": {"like": unknown}})
