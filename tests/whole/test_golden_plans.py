"""A refactor changes no plan: these are byte-compared. Where a change of price or rule means to change one, write them
anew with `PYTHONPATH=tests/support python tests/whole/test_golden_plans.py` and say the seconds before and after."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import zoo
from planmaker import cluster_of
from sampling import parametrize_or_slow
from shell import FACTORY, shell

from autoddl.api import compare, plan
from autoddl.core.errors import InputError
from autoddl.core.files import check_file, write_atomically
from autoddl.core.plan import Plan, load_plan

PLANS = Path(__file__).parent.parent / "plans"
CLUSTERS = PLANS.parent.parent / "examples" / "clusters"
CASES = [("gpt", "laptop"), ("llama", "a100-4x8"), ("vgg_bn", "frontier"), ("mixture", "two-racks-10g")]


def made(model: str, cluster: str) -> str:
    """The plan as text, but for what it was made from."""
    module, sample = getattr(zoo, model)()
    found: Plan = plan(module, CLUSTERS / f"{cluster}.yaml", sample, name=model, max_axes=2)
    data = json.loads(found.to_json())
    del data["source"]
    return json.dumps(data, indent=1) + "\n"


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_plan_is_the_one_on_record(model: str, cluster: str) -> None:
    assert made(model, cluster) == (PLANS / f"{model}-{cluster}.json").read_text()


@parametrize_or_slow("model,cluster", CASES[:1], CASES[1:2])
def test_no_strategy_beats_the_plan(model: str, cluster: str) -> None:
    module, sample = getattr(zoo, model)()
    found, *others = compare(module, CLUSTERS / f"{cluster}.yaml", sample, name=model, max_axes=2)
    assert found.plan is not None and [one.name for one in others] == [
        "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel", "HSDP", "tensor x data grid"]
    for one in others:
        assert one.plan is None or found.plan.predicted.seconds <= one.plan.predicted.seconds * (1 + 1e-9), one.name


@pytest.mark.ranks
@parametrize_or_slow("levels,layers,budget", [("net=2,node=2", 1, 32)], [("hall=2,net=2,node=2", 3, 39)])
def test_the_same_inputs_give_the_same_file(tmp_path: Path, levels: str, layers: int, budget: int) -> None:
    """Byte for byte, with one worker, and with two in another process."""
    place, files = tmp_path / "three.yaml", [tmp_path / f"{n}.json" for n in range(2)]
    place.write_text(cluster_of(levels).to_yaml())
    asked = ["plan", FACTORY, str(place), "--set", f"layers={layers}", "--budget", f"{budget} kB",
             "--microbatches", "1,2"]
    assert shell(*asked, "--workers", "1", "-o", str(files[0])).code == 0
    subprocess.run([sys.executable, "-m", "autoddl.cli", *asked, "--workers", "2", "-o", str(files[1])], check=True,
                   capture_output=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert files[0].read_bytes() == files[1].read_bytes()
    read = load_plan(files[0])
    assert read.budget == 1e3 * budget and read.proof != "elimination" and read.timings == {}
    assert read.to_json().encode() == files[0].read_bytes()


def test_a_file_written_again_keeps_its_mode(tmp_path: Path) -> None:
    """A new one has that of any new file."""
    path, other = tmp_path / "a", tmp_path / "b"
    other.write_text("as any")
    write_atomically(path, "one")
    assert path.stat().st_mode == other.stat().st_mode
    path.chmod(0o640)
    write_atomically(path, "two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    for text in ("new", "again"):
        check_file(link)
        write_atomically(link, text)
        assert link.is_symlink() and file.read_text() == text
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_file(pipe)
    write_atomically(pipe, "sent")
    assert os.read(end, 9) == b"sent" and pipe.is_fifo()
    os.close(end)
    assert set(tmp_path.iterdir()) == {file, link, pipe}


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(InputError, match=f"cannot write {path}: File too large"):
            write_atomically(path, "longer than that")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "one"


if __name__ == "__main__":
    for model, cluster in CASES:
        (PLANS / f"{model}-{cluster}.json").write_text(made(model, cluster))
