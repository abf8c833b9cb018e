"""What does a checkpoint cost the steps beside it? python checkpoint_steps.py [ranks [every [width]]]

A GPT of 4 layers, data parallel with ZeRO-2 over the ranks. Stretches of `every` steps, after the first of which a
checkpoint begins that is written beside the others, take turns with stretches without one. Of the first
rank are printed

    plain, with    seconds of a step, of a whole stretch by its length; and of the processor, all threads of the rank
    at once        seconds that training waits when a checkpoint begins: the state is collected and copied
    left           seconds that the checkpoint still takes when the stretch is over
    alone          seconds of the processor, all threads of the rank, of a checkpoint without steps beside it
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpt import gpt

import autoddl
from autoddl import recovery
from autoddl.launch.launch import launch, leave

ROUNDS = 12
CLUSTER = """
name: local
device: {{name: core, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {{float32: 50 GFLOP/s}}}}
levels:
  - {{name: node, size: {ranks}, bandwidth: 2 GB/s, latency: 30 us}}
"""


def rank(folder: str, every: int, width: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = autoddl.parallelize(gpt(layers=4, width=width, heads=4), autoddl.load_plan(f"{folder}/plan.json"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = gpt(layers=1, width=width, heads=4).example_inputs()

    def stretch(keeper: recovery.Keeper | None) -> tuple[float, float, float]:
        began, busy, waited = time.perf_counter(), time.process_time(), 0.0
        for number in range(every):
            model.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            if keeper is not None and not number:
                asked = time.perf_counter()
                keeper.save(model, optimizer)
                waited = time.perf_counter() - asked
        return (time.perf_counter() - began) / every, (time.process_time() - busy) / every, waited

    with recovery.Keeper(f"{folder}/kept", every) as keeper:
        stretch(keeper)
        found = []
        for _ in range(ROUNDS):
            plain, kept = stretch(None), stretch(keeper)
            began = time.perf_counter()
            keeper.finish()
            left, alone = time.perf_counter() - began, time.process_time()
            keeper.save(model, optimizer)
            keeper.finish()
            found.append((*plain[:2], *kept, left, time.process_time() - alone))
    if os.environ["RANK"] == "0":
        middle = [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
        wall, busy = (statistics.median(row[2 + i] / row[i] for row in found) for i in (0, 1))
        size = sum(p.numel() for p in model.module.parameters()) * 12 / 1e6
        print(f"{os.environ['WORLD_SIZE']} ranks, {size:.1f} MB of state, every {every} steps, medians of {ROUNDS} "
              f"pairs: plain {middle[0]:.1f} ms ({middle[1]:.1f} of the processor), with {middle[2]:.1f} ms "
              f"({middle[3]:.1f}): {wall - 1:+.1%} ({busy - 1:+.1%}); at once {middle[4]:.1f} ms, left "
              f"{middle[5]:.1f} ms; alone {middle[6]:.1f} ms of the processor", flush=True)
    leave(0)


def main() -> None:
    ranks, every, width = [*map(int, sys.argv[1:4]), *(2, 20, 256)[len(sys.argv) - 1:]]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "cluster.yaml")
        cluster.write_text(CLUSTER.format(ranks=ranks))
        plan = autoddl.plan(gpt(layers=4, width=width, heads=4), cluster, pins=["node=zero-2"])
        plan.save(f"{folder}/plan.json")
        launch(ranks, [sys.executable, __file__, "rank", folder, str(every), str(width)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
