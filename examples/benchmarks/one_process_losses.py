"""What coded and sparse sums of gradients do to the loss, with all ranks in one process.

    python examples/benchmarks/one_process_losses.py [NAME=VALUE ...]

    allow=;gradients=int8;gradients=int4,weights=int4;sparse=0.05,warmup=100   (the default)
    steps=300   seeds=1   first=0   ranks=4   layers=2   width=64   batch=16   context=64   falls=1
    optimizer=adamw   rate=1e-3   raised=1

A byte-level GPT on Python's standard library with AdamW, or sgd with a momentum of 0.9, which is that of the sums where
these have one. With falls=1 the rate falls evenly to 0. Every rank has its rows of the batch. Sums are those of the
runtime: `SparseSum` among threads, or its codecs, once on the way to the sum and once on the way back. Coded weights
are decoded before every step. With raised=4 the rate is four times as high in steps whose sums are sparse. No seconds
are measured. Printed is the mean loss of the last 50 steps.
"""

import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from compression import LAST, Trained
from demo import corpus

from autoddl.core.sparse import SparseRule
from autoddl.runtime.collectives.coding import decode, decode_sum, encode
from autoddl.runtime.collectives.sparse_sum import SparseSum

DEFAULTS = {"allow": ";gradients=int8;gradients=int4,weights=int4;sparse=0.05,warmup=100", "steps": "300",
            "seeds": "1", "first": "0", "ranks": "4", "layers": "2", "width": "64", "batch": "16", "context": "64",
            "falls": "1", "optimizer": "adamw", "rate": "1e-3", "raised": "1"}

Sum = Callable[[Sequence[Tensor]], Tensor]
"""The flat gradients of the ranks -> what every rank gets as their sum."""


def whole(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).sum(0)


def coded(name: str) -> Sum:
    """Sums of coded pieces, which are coded again to be gathered."""
    def add(rows: Sequence[Tensor]) -> Tensor:
        pieces = [torch.nn.functional.pad(row, (0, -len(row) % len(rows))).view(len(rows), -1) for row in rows]
        sent = [encode(name, one) for one in pieces]
        sums = [decode_sum(name, torch.stack([data[k] for data in sent]), pieces[0].shape[1]) for k in range(len(rows))]
        return recoded(name, torch.cat(sums)).view(-1)[:len(rows[0])]
    return add


def recoded(name: str, rows: Tensor) -> Tensor:
    return decode(name, encode(name, rows), rows.shape[1])


def sparse(rule: str, ranks: int, elements: int) -> Sum:
    """Sums of the runtime, among threads that swap through a table."""
    states = [SparseSum(SparseRule.parse(rule), ranks, rank, torch.zeros(elements)) for rank in range(ranks)]
    barrier, pool = threading.Barrier(ranks), ThreadPoolExecutor(ranks)
    table: dict[int, Sequence[Tensor]] = {}

    def one(rank: int, row: Tensor) -> Tensor:
        def swap(given: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
            table[rank] = [x.clone() for x in given]
            barrier.wait()
            got = [table[r][rank] for r in range(ranks)]
            barrier.wait()
            return got
        return states[rank].add([row], swap)[0]

    def add(rows: Sequence[Tensor]) -> Tensor:
        first, *_ = pool.map(one, range(ranks), rows)
        return first
    return add


def of_words(words: str, ranks: int, elements: int) -> tuple[Sum, str]:
    """How gradients add up, and the codec of weights, or ""."""
    if words.startswith("sparse="):
        return sparse(words.removeprefix("sparse="), ranks, elements), ""
    codecs = dict(word.split("=") for word in words.split(",") if word)
    return coded(codecs["gradients"]) if "gradients" in codecs else whole, codecs.get("weights", "")


def optimizer_of(name: str, words: str, parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """The optimizer; SGD has the momentum that the sums do not have."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate)
    summed = words.startswith("sparse=") and SparseRule.parse(words.removeprefix("sparse=")).momentum
    return torch.optim.SGD(parameters, lr=rate, momentum=0.0 if summed else 0.9)


def rate_part(step: int, steps: int, words: str, falls: bool, raised: float) -> float:
    """The part of the rate that a step has; above 1 where its sums are sparse and the rate is raised for these."""
    sparse = words.startswith("sparse=") and step >= SparseRule.parse(words.removeprefix("sparse=")).warmup
    return (1 - step / steps if falls else 1.0) * (raised if sparse else 1.0)


def trained(one: Trained, words: str, ranks: int, seed: int, falls: bool, name: str, rate: float, raised: float
            ) -> float:
    """The mean of the last losses of a run."""
    model = one._replace(batch=one.batch // ranks).model(seed)
    parameters, losses = list(model.parameters()), list[float]()
    add, codec = of_words(words, ranks, sum(p.numel() for p in parameters))
    optimizer = optimizer_of(name, words, parameters, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_part(step, one.steps, words, falls, raised))
    for ids, labels in one.batches(corpus(), seed):
        stored = [p.detach().clone() for p in parameters]
        if codec:
            fill(parameters, [recoded(codec, p.view(1, -1)).view_as(p) for p in stored])
        rows = [gradient(model, parameters, ids[r::ranks], labels[r::ranks], ranks) for r in range(ranks)]
        losses.append(sum(loss for loss, _ in rows))
        fill(parameters, stored)
        total = add([row for _, row in rows]).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, total, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        schedule.step()
    return statistics.mean(losses[-LAST:])


def fill(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


def gradient(model: nn.Module, parameters: Sequence[nn.Parameter], ids: Tensor, labels: Tensor, ranks: int
             ) -> tuple[float, Tensor]:
    """The loss of a rank's rows, and the flat gradient, both as parts of the mean over all."""
    loss = model(ids, labels) / ranks
    found = torch.autograd.grad(loss, parameters)
    return float(loss.detach()), torch.cat([g.reshape(-1) for g in found])


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = DEFAULTS | dict(text.split("=", 1) for text in sys.argv[1:])
    one, first = Trained(*(int(options[name]) for name in Trained._fields)), int(options["first"])
    weights = sum(p.numel() for p in one.model(0).parameters())
    for words in options["allow"].split(";"):
        ends = [trained(one, words, int(options["ranks"]), seed, options["falls"] == "1", options["optimizer"],
                        float(options["rate"]), float(options["raised"]))
                for seed in range(first, first + int(options["seeds"]))]
        print(f"{weights:,} weights, {one.steps} steps of {options['optimizer']} at {options['rate']}, rate "
              f"{'falls' * (options['falls'] == '1') or 'stays'}, {options['raised']} times with sparse sums  "
              f"{words or 'nothing':32} seeds from {first}: {', '.join(f'{end:.4f}' for end in ends)}  "
              f"mean {statistics.mean(ends):.4f}", flush=True)
