"""What a step takes on a device: seconds, bytes, places that wait, kernels by kind, and operators."""

import gc
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

KINDS = (("attention", ("flash", "fmha", "attention")), ("convolution", ("conv", "wgrad", "dgrad", "fprop", "cudnn")),
         ("product", ("gemm", "nvjet", "cutlass", "xmma", "splitk")))


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cleared(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def timed(step: Callable[[], object], model: nn.Module, device: torch.device, budget: float, warm: float = 0.0
          ) -> tuple[float, float, int]:
    """Seconds of a step, of the host's part of it, and the number of steps: 3 to 30, within `budget` seconds.

    Medians; the device is waited for between steps. It runs steps for `warm` seconds before, as products are slower on
    a device that is under load than on one that has rested."""
    began, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - began < warm:
        cleared(model)
        step()
        if count % 2:
            waited(device)
        count += 1
    waited(device)
    found, host = list[float](), list[float]()
    while len(found) < 3 or (len(found) < 30 and sum(found) < budget):
        cleared(model)
        waited(device)
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        waited(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found), statistics.median(host), len(found)


def peak(step: Callable[[], object], model: nn.Module, device: torch.device) -> dict[str, float]:
    """Bytes of the second step with AdamW: the most until gradients are there, and the most with the update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found: dict[str, float] = {}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        step()
        found["step"] = float(torch.cuda.max_memory_allocated(device))
        optimizer.step()
        found["update"] = float(torch.cuda.max_memory_allocated(device))
        optimizer.zero_grad()
    return found


def synchronisations(step: Callable[[], object], device: torch.device) -> str:
    """The first place of a step that waits for the device; empty where none does."""
    step()
    waited(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        return ""
    except RuntimeError as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return " < ".join(reversed(frames[-4:]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(step: Callable[[], object], device: torch.device) -> tuple[dict[str, float], list[list[Any]]]:
    """Device seconds of the kernels of one step by kind, and the 40 longest by name: seconds, calls, name."""
    step()
    waited(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        waited(device)
    kinds: dict[str, float] = defaultdict(float)
    rows = []
    for event in profile.key_averages():
        seconds = event.device_time_total / 1e6
        name = event.key.lower()
        kinds[next((kind for kind, words in KINDS if any(word in name for word in words)), "memory")] += seconds
        rows.append([seconds, event.count, event.key[:120]])
    return dict(kinds), sorted(rows, reverse=True)[:40]


def operators(step: Callable[[], object], device: torch.device) -> dict[str, list[float]]:
    """Device seconds of one step by operator, backward's included, and calls."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        waited(device)
    return {e.key: [e.self_device_time_total / 1e6, e.count] for e in profile.key_averages()
            if e.key.startswith(("aten::", "autograd::", "autoddl::")) and e.self_device_time_total}
