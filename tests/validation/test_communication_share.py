"""What communication takes of a step: published shares, steps by hand, one capture for all batches, wrong words."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from shell import shell
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.cost_models import Group, collective, load_cluster
from autoddl.explain.communication_share import Network, over, shares
from autoddl.explain.data_parallel_work import Work, traced, work_of
from autoddl.validation.share_models import MODELS

CLUSTER = str(Path(__file__).parent.parent.parent / "examples" / "clusters" / "two-a100-pcie.yaml")
TINY = f"{Path(__file__).parent.parent / 'support' / 'tiny.py'}:tiny"
PUBLISHED = {"tcp=Ethernet-10G": (0.24, 0.86, 0.92), "ipoib": (0.24, 0.78, 0.84), "rdma-host": (0.24, 0.48, 0.54)}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.second(torch.relu(self.first(x))).sum()
        return total


def test_shares_of_gpt2_medium_as_published() -> None:
    found = shares(traced(*MODELS["gpt2-medium"](16)), load_cluster(CLUSTER), [Network.parse(t) for t in PUBLISHED],
                   (2, 4, 8), overlap=False)
    measured = [share for row in PUBLISHED.values() for share in row]
    assert fmean(abs(cell.share - m) for cell, m in zip(found, measured, strict=True)) <= 0.05


def test_one_capture_is_that_of_every_batch() -> None:
    one = traced(Two(), torch.zeros(8, 64))
    assert one.batch == 8 and one.parameters == 2 * 64 * 65
    straight = add_hubs(capture(Two(), torch.zeros(4, 64)).graph)
    assert [t.shape for t in one.of(4).tensors] == [t.shape for t in straight.tensors]


def test_a_step_by_hand() -> None:
    cluster, one = load_cluster(CLUSTER), traced(Two(), torch.zeros(8, 64))
    (cell,) = shares(one, cluster, [Network("ipoib")], [4], overlap=False)
    assert cell.batch == 2 and cell.step == pytest.approx(cell.compute + cell.communication)
    sent = collective(over(cluster, Network("ipoib")), "all-reduce", Group(((4, 1),)), 4.0 * one.parameters).seconds
    assert cell.communication == cell.exposed == sent and cell.share == pytest.approx(sent / cell.step)
    (half,) = shares(one, cluster, [Network("ipoib")], [4], overlap=False, gradient=2)
    assert half.communication < cell.communication


def test_the_host_is_waited_for_and_gradients_come_with_backward() -> None:
    one, cluster = traced(Two(), torch.zeros(8, 64)), load_cluster(CLUSTER)
    slow, free = work_of(one.of(8), cluster, host=1e-3), work_of(one.of(8), cluster, host=0.0)
    assert isinstance(free, Work) and slow.forward == pytest.approx(4e-3) and slow.seconds > free.seconds
    assert [nbytes for _, nbytes in free.backward if nbytes] == [4.0 * 64 * 65] * 2 and free.nbytes == 8 * 64 * 65


def test_overlap_hides_what_fits_beside_backward() -> None:
    cluster, one = load_cluster(CLUSTER), traced(*MODELS["gpt2-medium"](16))
    networks = [Network("rdma-host"), Network("tcp", "Ethernet-10G")]
    after = shares(one, cluster, networks, (8,), overlap=False)
    beside = shares(one, cluster, networks, (8,))
    assert all(b.share < a.share and b.exposed < b.communication for a, b in zip(after, beside, strict=True))


def test_the_table_and_its_json() -> None:
    words = ("network", CLUSTER, "--model", TINY, "--protocol", "ipoib", "--protocol", "tcp=Ethernet-10G")
    said = shell(*words, "--ranks", "2,4", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert set(found) == {"model", "parameters", "batch", "overlap", "rows"} and found["overlap"] is True
    assert [(row["protocol"], row["link"], row["ranks"]) for row in found["rows"]] == [
        ("ipoib", None, 2), ("ipoib", None, 4), ("tcp", "Ethernet-10G", 2), ("tcp", "Ethernet-10G", 4)]
    assert "tcp=Ethernet-10G" in shell(*words).out


def test_powers_of_two_that_lie_unevenly_over_nodes_are_left_out(tmp_path: Path) -> None:
    text = Path(CLUSTER).read_text()
    (tmp_path / "six.yaml").write_text(text.replace("name: node, size: 2", "name: node, size: 6"))
    said = shell("network", str(tmp_path / "six.yaml"), "--model", TINY, "--protocol", "tcp", "--json")
    assert said.code == 0, said.err
    assert [row["ranks"] for row in json.loads(said.out)["rows"]] == [2]


@pytest.mark.parametrize(("words", "message"), [
    (("--protocol", "pigeon"), "'pigeon' is no protocol"), (("--protocol", "direct"), "inside a host"),
    (("--protocol", "tcp=Ethernet-9G"), "no known link"), (("--ranks", "two"), "whole numbers"),
    (("--ranks", "3"), "3 ranks: cluster two-a100-pcie has 8"), (("--gradient", "int4"), "'int4' are not known"),
    (("--host", "slow"), "slow")])
def test_a_wrong_word_is_one_error(words: tuple[str, ...], message: str) -> None:
    said = shell("network", CLUSTER, "--model", TINY, *words)
    assert said.code == 2 and message in said.err and len(said.err.strip().splitlines()) == 1, said


def test_what_is_missing_is_one_error(tmp_path: Path) -> None:
    for words, message in ((("none.yaml", "--model", TINY), "cannot read cluster file"),
                           ((CLUSTER, "--model", str(tmp_path / "none.py:f")), "there is no file"),
                           ((CLUSTER, "--model", "gpt5"), "write FILE.py:FACTORY, or one of gpt2-medium, t5-large"),
                           ((CLUSTER, "--model", "t5-large", "--set", "layers=2"), "has one argument, batch")):
        said = shell("network", *words)
        assert said.code == 2 and message in said.err and len(said.err.strip().splitlines()) == 1, said
    cluster = load_cluster(CLUSTER)
    with pytest.raises(InputError, match="has no network, only node"):
        over(replace(cluster, levels=cluster.levels[:1]), Network("tcp"))
    with pytest.raises(InputError, match="dim 0 of every input is the batch"):
        traced(Two(), ())
