"""What the program says of sums of gradients that send the largest values alone."""

import json
from pathlib import Path

import pytest
from shell import FACTORY, PAIR, shell

from autoddl.core.plan import load_plan

SLOW = PAIR.replace("100 MB/s", "10 kB/s").replace("1 GB/s", "10 GB/s").replace("10 MFLOP/s", "1 GFLOP/s")
FAST = PAIR.replace("100 MB/s", "100 GB/s")


@pytest.fixture
def slow(tmp_path: Path) -> str:
    (tmp_path / "slow.yaml").write_text(SLOW)
    return str(tmp_path / "slow.yaml")


def test_a_plan_says_what_a_sparse_sum_saves_and_keeps(slow: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = shell("plan", FACTORY, slow, "--set", "dropout=0.0", "--mine", "dp=2", "--sparse",
                 "0.02,warmup=5,falls=9,momentum=0.9", "-o", str(path))
    assert said.code == 0, said
    text = " ".join(said.out.split())
    assert "the largest 2% of the values of " in text and "a step, not " in text and "residuals" in text
    assert "P->B as top 0.02,warmup=5,falls=9,momentum=0.9" in text
    assert "the first 5 steps add up whole" in text and "the next 9 steps send the largest 25%, 6.25%, each" in text
    assert "give the optimizer none" in text
    plan, shown = load_plan(path), shell("show", str(path), "--json")
    assert json.loads(shown.out)["sparse"] == "0.02,warmup=5,falls=9,momentum=0.9"
    assert plan.sparse_sums and not plan.codecs
    assert plan.predicted.nbytes["residuals"] > 0
    proved = shell("explain", str(path), "--proof")
    assert proved.code == 0 and "this one takes" in proved.out, proved
    assert shell("explain", str(path), plan.stored[0].fqn).code == 0


def test_without_the_word_nothing_is_sparse_and_on_fast_links_nothing_gains(slow: str, tmp_path: Path) -> None:
    (tmp_path / "fast.yaml").write_text(FAST)
    plain = shell("plan", FACTORY, slow, "--set", "dropout=0.0", "--mine", "dp=2")
    assert plain.code == 0 and "sparse" not in plain.out
    said = shell("plan", FACTORY, str(tmp_path / "fast.yaml"), "--set", "dropout=0.0", "--mine", "dp=2", "--sparse",
                 "0.02")
    assert said.code == 0 and "nothing: sums of the largest 2% would be faster nowhere" in " ".join(said.out.split())


@pytest.mark.parametrize(("rule", "message"), [
    ("0.01,warmup", "'0.01,warmup' is no sparse sum: write SHARE"), ("a", "'a' is no sparse sum: write SHARE"),
    ("0.01,warmup=x", "'0.01,warmup=x' is no sparse sum: write SHARE"),
    ("0.01,momentum=1", "a momentum of 1 is none: it is "), ("0.01,falls=-1", "a fall of -1 steps is none: it is "),
    ("0.01,warmup=-1", "a warm-up of -1 steps is none: it is ")])
def test_a_rule_that_is_none_is_refused_in_a_line(slow: str, rule: str, message: str) -> None:
    said = shell("plan", FACTORY, slow, f"--sparse={rule}")
    assert (said.code, said.out) == (2, "") and message in said.err and said.err.count("\n") == 1, said


@pytest.mark.parametrize("share", ["0", "1.01", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused_in_a_line(slow: str, share: str) -> None:
    said = shell("plan", FACTORY, slow, f"--sparse={share}")
    assert said.code != 0 and f"a sparse share of {float(share):g} is none" in said.err and said.err.count("\n") <= 1
