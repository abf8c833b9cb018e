"""Processes start as torchrun's do, end together, and leave one word."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from autoddl.core.errors import MachineError, MismatchError
from autoddl.core.processes import is_rank, signals_raise
from autoddl.launch.launch import launch, python_module
from autoddl.planner.process_pool import mapper


def script(folder: Path, text: str, imports: str = "time") -> list[str]:
    """The command of ranks that run `text`, as a script, and as the module `rank` for forks, which share `imports`."""
    path, body = folder / "rank.py", "rank = int(os.environ['RANK'])\n" + textwrap.dedent(text)
    path.write_text(f"import os, sys, time, {imports}\ndef main():\n{textwrap.indent(body, '    ')}\n"
                    "if __name__ == '__main__':\n    main()\n")
    return [sys.executable, str(path)]


def started(ranks: int, command: list[str], forked: bool, **options: Any) -> None:
    """Ranks of a `script`, each a process of its own or all forks of one."""
    launch(ranks, python_module("rank", command[1]) if forked else command, forked=forked, **options)


@pytest.fixture(params=[False, True], ids=["started", "forked"])
def forked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ranks are forks of one process, which then finds the script as a module."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return bool(request.param)


def alive(folder: Path) -> list[int]:
    """Processes of this test that still run: python with the folder's script."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if str(folder / "rank.py") in words:
            found.append(int(entry.name))
    return found


@pytest.mark.ranks
def test_ranks_are_not_forked_where_that_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("autoddl.launch.launch.start_forks", None)
    started(1, script(tmp_path, f"open({str(tmp_path / 'out')!r}, 'w').write(sys.platform)"), True)
    assert (tmp_path / "out").read_text() == "linux"


@pytest.mark.ranks
def test_every_rank_gets_the_environment_of_torchrun(tmp_path: Path, forked: bool) -> None:
    started(3, script(tmp_path, f"""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        open({str(tmp_path)!r} + f"/out-{{rank}}", "w").write(" ".join(os.environ[n] for n in names))
        assert int(os.environ["MASTER_PORT"]) > 0
    """), forked)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 3)))
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(3)] == [
        f"{rank} {rank} 3 3 127.0.0.1 {threads}" for rank in range(3)]


@pytest.mark.ranks
def test_a_ranks_own_error_becomes_the_launchers_and_ends_all(tmp_path: Path, forked: bool) -> None:
    command = script(tmp_path, """
        from autoddl.core.errors import MachineError, MismatchError
        from autoddl.launch.launch import report_failure
        if rank == 2:
            report_failure(MachineError("rank 1 is gone"))
            sys.exit(4)
        if rank == 1:
            time.sleep(0.3)
            report_failure(MismatchError("this is another model"))
            sys.exit(2)
        time.sleep(600)
    """)
    with pytest.raises(MismatchError, match=r"^rank 1: this is another model$"):
        started(3, command, forked)
    assert not alive(tmp_path)


@pytest.mark.ranks
def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path, forked: bool) -> None:
    command = script(tmp_path, "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)")
    with pytest.raises(MachineError, match=r"rank 1 was killed by SIGKILL; all ranks were ended"):
        started(2, command, forked)
    assert not alive(tmp_path)


@pytest.mark.ranks
def test_a_killed_parent_of_forks_is_not_taken_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = script(tmp_path, "rank == 1 and os.kill(os.getppid(), 9); time.sleep(600)")
    with pytest.raises(MachineError) as caught:
        started(2, command, True)
    assert str(caught.value) == ("the process of which all ranks are forks was killed by SIGKILL, and they ended with "
                                 "it: start again, with --resume where there are checkpoints")
    assert not alive(tmp_path)


@pytest.mark.ranks
def test_forks_of_the_launcher_have_what_it_has_and_end_as_ranks_do(tmp_path: Path) -> None:
    made = ["known"]

    def rank() -> None:
        (tmp_path / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        if made[0] == "known":
            (tmp_path / os.environ["RANK"]).write_text(f"{made[0]} {os.environ['WORLD_SIZE']}")
        elif os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(600)

    launch(2, [], here=rank)
    assert [(tmp_path / str(k)).read_text() for k in range(2)] == ["known 2"] * 2
    made[0] = "lost"
    with pytest.raises(MachineError, match=r"rank 1 was killed by SIGKILL; all ranks were ended"):
        launch(2, [], here=rank)
    for k in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{k}").read_text()), 0)


@pytest.mark.ranks
def test_a_silent_failure_is_named_with_its_exit_code(tmp_path: Path, forked: bool) -> None:
    with pytest.raises(MachineError, match=r"rank 0 ended with exit code 7 and left no word"):
        started(1, script(tmp_path, "sys.exit(7)"), forked)


@pytest.mark.ranks
def test_a_timeout_names_the_ranks_that_still_run(tmp_path: Path, forked: bool) -> None:
    command = script(tmp_path, "time.sleep(600 if rank else 0)")
    with pytest.raises(MachineError, match=r"after [01].5 s rank 1 still ran"):
        started(2, command, forked, timeout=1.5 if forked else 0.5)
    assert not alive(tmp_path)


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends ranks with their launcher on Linux only")
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, forked: bool) -> None:
    command = script(tmp_path, "time.sleep(600)")
    if forked:
        command = python_module("rank", command[1])
    code = f"from autoddl.launch.launch import launch; launch(2, {command!r}, forked={forked})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 20
    while len(alive(tmp_path)) < 2 + forked and time.monotonic() < until:
        time.sleep(0.05)
    assert len(alive(tmp_path)) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 5
    while alive(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(tmp_path)


@pytest.mark.ranks
def test_a_slurm_step_is_a_rank_and_one_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
                 "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was, though the step itself sets it
        monkeypatch.delenv(name)
    assert not is_rank()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert not is_rank()  # a batch script that nobody started with srun
    for name, value in {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "31",
                        "SLURM_JOB_NODELIST": "nid[003-006]", "RANK": "", "PATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK")
    assert is_rank()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "nid003", "MASTER_PORT": "20031"}
    for name in found:
        monkeypatch.delenv(name)


def handlers(_: object = None) -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup, in this process and in its workers; SIGTERM still ends them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raise():
            term, hangup = handlers()
            assert callable(term) and hangup == signal.SIG_IGN
        with mapper(handlers, 2) as run:
            assert list(run([1, 2])) == [[signal.SIG_DFL, signal.SIG_IGN]] * 2
    finally:
        signal.signal(signal.SIGHUP, before)
    with mapper(handlers, 2) as run:
        assert list(run([1, 2])) == [[signal.SIG_DFL, signal.SIG_DFL]] * 2 or before == signal.SIG_IGN


@pytest.mark.ranks
def test_a_module_that_lies_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "platform", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    (tmp_path / "elsewhere").mkdir()
    command = script(tmp_path / "elsewhere", "import random, platform, json; sys.exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MachineError, match="exit code 7"):
        started(1, command, True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="sockets are listed by Linux's /proc")
def test_ranks_listen_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        import torch
        import torch.distributed as dist
        from datetime import timedelta
        from pathlib import Path
        from autoddl.core.layout import Mesh
        from autoddl.runtime.world import join_processes
        join_processes(Mesh.parse("a=2"), torch.device("cpu"), timedelta(seconds=60))
        dist.all_reduce(torch.ones(2))
        mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")}
        rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").readlines()[1:]]
        found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
        Path(__file__).with_name(f"found-{rank}").write_text(" ".join(found))
        dist.barrier()
    """
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started(2, script(tmp_path, text, "torch.distributed, autoddl.runtime.world"), True)
    for rank in range(2):
        listening = (tmp_path / f"found-{rank}").read_text().split()
        assert listening and set(listening) <= {"0100007F", "00000000000000000000000001000000"}
