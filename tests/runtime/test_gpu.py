"""On a GPU a plan runs as one device would, waits for nothing inside a step, and is one CUDA graph if asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import autoddl
from autoddl.calibrate.measure import measure
from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster
from autoddl.runtime.parallelize import ParallelModel, parallelize
from autoddl.runtime.step_graph import check_graph

CLUSTER = """name: one gpu
device: {name: %s, kind: gpu, memory: 16 GB, bandwidth: 1 TB/s, peak: {bfloat16: 100 TFLOP/s, float32: 20 TFLOP/s}}
backend: nccl
levels: [{name: gpu, size: 1, bandwidth: 100 GB/s, latency: 10 us}]
"""


def on_a_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")(test))


def planned(tmp_path: Path, model: nn.Module, sample: Any, **options: Any) -> Plan:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER % "gpu", encoding="utf-8")
    return autoddl.plan(model, path, sample, **options)


def on_gpu(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = getattr(zoo, name)()
    args = tuple(x.cuda() for x in sample.args)
    return model.cuda(), Sample(args, {k: v.cuda() if isinstance(v, torch.Tensor) else v
                                       for k, v in sample.kwargs.items()})


def trained(parallel: ParallelModel, sample: Any, steps: int, keep: bool = False) -> list[float]:
    """Losses of steps with SGD; with `keep`, the gradients of two steps are added up."""
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.01), []
    for i in range(steps):
        losses.append(float(parallel.step(sample)))
        if not keep or i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_a_gpu
@pytest.mark.parametrize("name", ["gpt", "llama", "vgg_bn"])
def test_a_step_has_the_gradients_of_the_module(tmp_path: Path, name: str) -> None:
    module, sample = on_gpu(name)
    plan = planned(tmp_path, module, sample)
    loss = module(*sample.args, **sample.kwargs)
    loss.backward()
    truth = {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
    module, _ = on_gpu(name)
    parallel = parallelize(module, plan)
    torch.testing.assert_close(parallel.step(sample), loss.detach())
    for key, p in module.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, truth[key], rtol=1e-3, atol=1e-4)


@on_a_gpu
def test_nothing_in_a_step_waits_for_the_device(tmp_path: Path) -> None:
    module, sample = on_gpu("gpt")
    parallel = parallelize(module, planned(tmp_path, module, sample, precision="bf16-mixed", microbatches=(2,)))
    parallel.step(sample)
    torch.cuda.set_sync_debug_mode("error")
    try:
        parallel.step(sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
@pytest.mark.parametrize("keep", [False, True])
def test_steps_of_one_graph_are_those_without(tmp_path: Path, keep: bool) -> None:
    module, sample = on_gpu("vgg_bn")
    plan = planned(tmp_path, module, sample)
    truth = trained(parallelize(module, plan), sample, 6, keep)
    module, sample = on_gpu("vgg_bn")
    assert trained(parallelize(module, plan, graph=True), sample, 6, keep) == pytest.approx(truth, rel=1e-3)


@on_a_gpu
@pytest.mark.ranks
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER % torch.cuda.get_device_name().split()[1], encoding="utf-8")
    measure(path, seconds=3, small=True)
    assert load_cluster(path).device.curves


def test_a_graph_is_for_gpus_and_draws_no_masks(tmp_path: Path) -> None:
    model, sample = zoo.gpt()
    plan = planned(tmp_path, model, sample)
    with pytest.raises(InputError, match="on a GPU only, and this rank runs on cpu"):
        parallelize(model, plan, device="cpu", graph=True)
    dropping, sample = zoo.gpt(dropout=0.1)
    with pytest.raises(InputError, match=r"blocks\.0.* draws other numbers in every step"):
        check_graph(capture(dropping, sample).graph, torch.device("cuda"))
