"""What the program says of messages that are coded: bytes with and without, and by how much values may be off."""

from pathlib import Path

import pytest
from shell import FACTORY, PAIR, shell

SLOW = PAIR.replace("100 MB/s", "100 kB/s").replace("1 GB/s", "10 GB/s").replace("10 MFLOP/s", "1 GFLOP/s")


@pytest.fixture
def slow(tmp_path: Path) -> str:
    (tmp_path / "slow.yaml").write_text(SLOW)
    return str(tmp_path / "slow.yaml")


@pytest.mark.parametrize("ways", [("--mine", "dp=2"), ("--stages", "2", "--microbatches", "2")])
def test_a_plan_says_what_coding_saves_and_costs(slow: str, ways: tuple[str, ...]) -> None:
    said = shell("plan", FACTORY, slow, "--set", "dropout=0.0", "--compress",
                 "activations=int8,pipeline=int8,gradients=int8", *ways)
    assert said.code == 0, said
    text = " ".join(said.out.split())
    assert "int8: rank 0 sends " in text and "off by at most 0.0039 of the largest in its block of 1,024" in text


@pytest.mark.parametrize(("words", "message"), [
    (("--compress", "gradients=zip"), "compresses nothing: there is no codec 'zip'; write MESSAGES=CODEC"),
    (("--compress", "gradients=int8", "--error", "1e-3"), "int8 errs by up to 0.0039 of the largest value of a block"),
    (("--error", "2"), "an error of 2 is none: it is the part of a block's largest magnitude")])
def test_what_cannot_be_compressed_so_is_refused_in_a_line(slow: str, words: tuple[str, ...], message: str) -> None:
    said = shell("plan", FACTORY, slow, *words)
    assert said.code != 0 and message in " ".join(said.err.split()), said
