"""A device of so many FLOP/s, however many cores this machine has and whatever else they do: products are paced.

Each product computes its result, then sleeps until a device of that speed would be done. So a rank takes next to none
of the cores, eight ranks run side by side on two, and what is measured are schedules and links. Every program of this
process is slowed down alike, whether it calls torch's modules, DTensor, autograd or a plan. What is no product takes
what it takes here.
"""

import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["Pace", "in_real_time"]

PRODUCTS = ("mm", "mm.out", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward")


class Pace:
    """The speed of products in this process, `rate` in FLOP/s: as fast as they are until `start` is called.

    `flops` counts those of all products since it was last set to 0."""

    def __init__(self) -> None:
        self.rate, self.flops = math.inf, 0.0
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for name in PRODUCTS:
                self._library.impl(name, self._paced(name), "CPU", with_keyset=True)

    def start(self, rate: float) -> None:
        """Paces products from here on."""
        self.rate = rate

    def _paced(self, name: str) -> Callable[..., Any]:
        kernel, count = torch.library.get_kernel(f"aten::{name}", "CPU"), _COUNTS[name]

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            start, flops = time.perf_counter(), count(*args)
            found = kernel.call_boxed(keys, *args, **kwargs)
            self.flops += flops
            time.sleep(max(0.0, start + flops / self.rate - time.perf_counter()))
            return found

        return run


def in_real_time(wanted: bool) -> None:
    """Lets all threads of this process wake up as soon as their sleep is over, whatever else the cores do, or not."""
    policy = os.SCHED_RR if wanted else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setscheduler(int(thread), policy, os.sched_param(int(wanted)))


def _attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any) -> float:
    """FLOPs of q k^T and of its product with v; where it is causal, half of all pairs are masked out."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (1 + causal)
    return float(2.0 * pairs * (k.shape[3] + v.shape[3]))


def _attention_backward(_: Any, q: Any, k: Any, v: Any, __: Any, ___: Any, *more: Any) -> float:
    """FLOPs of five products in place of two."""
    return 2.5 * _attention(q, k, v, *more)


_COUNTS: dict[str, Callable[..., float]] = {
    "mm": lambda a, b: 2.0 * a.shape[0] * a.shape[1] * b.shape[1],
    "mm.out": lambda a, b: 2.0 * a.shape[0] * a.shape[1] * b.shape[1],
    "addmm": lambda _, a, b, *__: 2.0 * a.shape[0] * a.shape[1] * b.shape[1],
    "bmm": lambda a, b: 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2],
    "baddbmm": lambda _, a, b, *__: 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward}
