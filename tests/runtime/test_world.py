"""Where a process runs: the plan's backend says it, and a GPU that is not there is one clear error."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import zoo
from planmaker import random_plans
from shell import ROOT

from autoddl.calibrate.rank import _device
from autoddl.calibrate.request import Request
from autoddl.core.errors import InputError, MachineError
from autoddl.core.layout import Mesh
from autoddl.cost_models import load_cluster
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.parallelize import parallelize
from autoddl.runtime.world import check_agreement, device_of, set_current_device


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int) -> None:
    """As if this one had `gpus`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))


@pytest.mark.parametrize(("backend", "gpus", "found"), [
    ("gloo", 8, "cpu"), ("gloo", 0, "cpu"), ("nccl", 8, "cuda:3"), ("nccl", 0, "cpu")])
def test_the_device_follows_the_plan(monkeypatch: pytest.MonkeyPatch, backend: str, gpus: int, found: str) -> None:
    machine(monkeypatch, gpus, 3)
    assert device_of(backend) == torch.device(found)
    assert device_of(backend, "cuda:1") == torch.device("cuda:1") and device_of(backend, "cpu") == torch.device("cpu")


def test_a_plan_for_gloo_runs_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = zoo.regression(torch.float64)
    (plan,) = random_plans(model, sample, "one=1", 1)
    machine(monkeypatch, 8, 3)
    parallel = parallelize(model, replace(plan, backend="gloo"))
    assert {p.device.type for p in parallel.parameters()} == {"cpu"} and parallel.step(sample).device.type == "cpu"


def test_more_processes_than_gpus_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2, 2)
    model, sample = zoo.regression(torch.float64)
    (plan,) = random_plans(model, sample, "one=1", 1)
    for start in (lambda: set_current_device(device_of("nccl")),
                  lambda: parallelize(model, replace(plan, backend="nccl"))):
        with pytest.raises(InputError, match=r"on cuda:2, and its machine shows it 2 GPUs: start at most one process"):
            start()


def test_a_gpu_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device is busy\nCompile with TORCH_USE_CUDA_DSA")

    machine(monkeypatch, 2, 1)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(MachineError, match=r"cannot use cuda:1: CUDA error: device is busy$"):
        set_current_device(device_of("nccl"))
    set_current_device(torch.device("cuda"))
    set_current_device(torch.device("cpu"))


def test_a_measurement_takes_the_device_that_a_plan_would(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("", "a100.yaml", 1.0, ranks=4)
    cluster = load_cluster(ROOT / "examples" / "clusters" / "a100-4x8.yaml")
    machine(monkeypatch, 2, 3)
    with pytest.raises(InputError, match="on cuda:3, and its machine shows it 2 GPUs"):
        _device(cluster, request)
    core = replace(cluster.device, kind="cpu")
    assert _device(replace(cluster, device=core), request) == torch.device("cpu")


def test_a_rank_that_is_gone_before_the_first_step_is_a_machine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:29500")

    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    for name in ("all_gather", "new_group"):
        monkeypatch.setattr(dist, name, closed)
    with pytest.raises(MachineError, match="comparing the plan and the seed of the ranks failed: Connection closed by"):
        check_agreement({"plan": [1], "seed": [2]})
    with pytest.raises(MachineError, match=r"connecting the ranks along a failed: Connection closed by peer.*restart"):
        Groups(Mesh.parse("a=2"), [(0,)])
