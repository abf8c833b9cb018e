"""Plans a small GPT for four processes, trains it on them and on one, and compares. Run: make demo

Where this machine can shape links (root, tc), the four are two nodes behind links of 200 Mbit/s; else they share
loopback, and the demo says why. The text is Python's own standard library, byte by byte; the one process is plain
PyTorch, without AutoDDL.
"""

import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpt import gpt
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import autoddl
from autoddl.cli.tables import plan_tables
from autoddl.core.errors import MachineError
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import Place, launch, leave
from autoddl.launch.places import network_places
from autoddl.launch.shaped_network import check_machine, shape_links

CLUSTERS = Path(__file__).parent / "clusters"
SHAPED, UNSHAPED = CLUSTERS / "rehearsal-2x2-200.yaml", CLUSTERS / "laptop.yaml"
STEPS, BATCH, CONTEXT, LEARNING_RATE = 30, 16, 128, 1e-3
TOLERANCE = 1e-5

Step = Callable[[tuple[Tensor, Tensor]], float]


def corpus() -> Tensor:
    """The standard library's modules, one after the other."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(text: Tensor, step: int, size: int = BATCH, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """The step's windows of the text, `size` of `context` bytes, and the same moved on by one byte."""
    starts = torch.randint(0, len(text) - context - 1, (size,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def model() -> nn.Module:
    """A byte-level GPT with the usual small weights."""
    torch.manual_seed(0)
    made = gpt(layers=4, width=128, heads=4, context=CONTEXT, batch=BATCH)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return made


def train(step: Step, heard: Callable[[float], None]) -> list[float]:
    """Seconds of every step; `heard` is told the losses."""
    text, seconds = corpus(), []
    for number in range(STEPS):
        start = time.perf_counter()
        loss = step(batch(text, number))
        seconds.append(time.perf_counter() - start)
        heard(loss)
    return seconds


def stepping(loss_of: Callable[[tuple[Tensor, Tensor]], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """Loss and gradients of a batch, then the optimizer's step."""
    def step(batch: tuple[Tensor, Tensor]) -> float:
        loss = loss_of(batch)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def one_rank(folder: Path) -> None:
    """What each of the four processes runs."""
    parallel = autoddl.parallelize(model(), autoddl.load_plan(folder / "plan.json"))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    with open(folder / f"losses-{os.environ['RANK']}", "w", buffering=1, encoding="utf-8") as file:
        seconds = train(stepping(parallel.step, optimizer), lambda loss: print(repr(loss), file=file))
    if os.environ["RANK"] == "0":
        (folder / "seconds").write_text(json.dumps(seconds), encoding="utf-8")
    leave(0)


def chosen(console: Console) -> tuple[Path, bool]:
    """The cluster, and whether its links are shaped."""
    try:
        check_machine()
    except MachineError as error:
        console.print(f"on loopback, not on shaped links: {error}\n")
        return UNSHAPED, False
    return SHAPED, True


@contextmanager
def placed(cluster: Path, shaped: bool) -> Iterator[list[Place] | None]:
    """Where the processes run, while the network stands."""
    if not shaped:
        yield None
        return
    place = load_cluster(cluster)
    with shape_links(place) as built:
        yield network_places(built)


def four_processes(plan: autoddl.Plan, places: list[Place] | None, console: Console
                   ) -> tuple[list[float], list[float]]:
    """(losses, seconds) of every step."""
    with tempfile.TemporaryDirectory() as name, Progress(console=console) as bar:
        folder, task = Path(name), bar.add_task(f"training on {plan.mesh.size} processes", total=STEPS)
        plan.save(folder / "plan.json")

        def losses() -> list[float]:
            path = folder / "losses-0"
            return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

        launch(plan.mesh.size, [sys.executable, __file__, name], places=places,
               tick=lambda: bar.update(task, completed=len(losses())))
        return losses(), json.loads((folder / "seconds").read_text())


def one_process(console: Console) -> list[float]:
    """The losses of plain PyTorch."""
    alone, losses = model(), list[float]()

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = alone(*batch)
        torch.autograd.backward(loss)
        return loss.detach()

    with Progress(console=console) as bar:
        task = bar.add_task("training on one process", total=STEPS)

        def heard(loss: float) -> None:
            losses.append(loss)
            bar.update(task, completed=len(losses))

        train(stepping(loss_of, torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE)), heard)
    return losses


def main() -> int:
    console = Console(soft_wrap=True)
    cluster, shaped = chosen(console)
    plan = autoddl.plan(model(), cluster, batch(corpus(), 0), name="gpt")
    print(plan_tables.text(plan_tables.plan_table(plan)), "\n", flush=True)
    with placed(cluster, shaped) as places:
        together, seconds = four_processes(plan, places, console)
    alone = one_process(console)
    worst = max(abs(a - b) / abs(b) for a, b in zip(together, alone, strict=True))
    console.print("", *(f"step {i + 1:2}   {plan.mesh.size} processes {together[i]:.6f}   one process {alone[i]:.6f}"
                        for i in (*range(0, STEPS, 6), STEPS - 1)), sep="\n")
    console.print(f"largest relative difference of the losses  {worst:.1e}  (at most {TOLERANCE:.0e})")
    console.print(f"step time  {plan.predicted.seconds * 1e3:.1f} ms predicted, "
                  f"{statistics.median(seconds[1:]) * 1e3:.1f} ms measured (median)")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_rank(Path(sys.argv[1]))
    sys.exit(main())
