"""The program that `autoddl export --to fsdp2` writes trains with the losses of one process."""

import importlib.util
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from sampling import parametrize_or_slow

from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.describe import norm_modules, tensor_pieces
from autoddl.export.exported import export_plan
from autoddl.export.fsdp2 import FSDP2
from autoddl.export.price import price_configuration
from autoddl.export.subject import Subject, subject_of
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import PlanTask, task_of

ROOT = Path(__file__).parent.parent.parent
TWO_BY_TWO = ROOT / "examples" / "clusters" / "rehearsal-2x2-200.yaml"
ARGUMENTS = {"layers": 2, "width": 32, "heads": 4, "context": 8, "vocab": 64}
STEPS = 3


def grid(*degrees: tuple[str, int]) -> tuple[Degree, ...]:
    return tuple(Degree(role, size) for role, size in degrees)


CONFIGURATIONS = {
    "data parallel": Configuration(grid(("data", 4)), 2),
    "ZeRO-1 in parts": Configuration(grid(("zero-1", 4)), 1, 2),
    "ZeRO-3 in parts, recomputed": Configuration(grid(("zero-3", 4)), 1, 2, recompute="full"),
    "HSDP, one block selective": Configuration(grid(("data", 2), ("zero-3", 2)), 2, recompute="first-1:selective"),
    "a copy in each node": Configuration(grid(("zero-2", 2), ("zero-3", 2)), 1, 2),
    "a grid": Configuration(grid(("zero-3", 2), ("tensor", 2)), 2, 2),
    "tensor parallel": Configuration(grid(("tensor", 4)), 8),
}


@lru_cache
def task() -> PlanTask:
    options = PlanOptions(microbatches=(1, 2), workers=1, precision="float32")
    factory = {"file": str(ROOT / "examples" / "gpt.py"), "name": "gpt", "arguments": ARGUMENTS}
    return task_of(_model(), load_cluster(TWO_BY_TWO), None, options, "gpt", factory)


def _model() -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("example_gpt", ROOT / "examples" / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: torch.nn.Module = module.gpt(**ARGUMENTS)
    return made


def plan_of(given: Configuration) -> Plan:
    whole = Subject("gpt", task().variant(given.microbatches).original, task().cluster, {})
    return price_configuration(task(), given, (given.recompute,), whole)


def tensor_plan(text: str) -> str:
    """The styles of modules in the text of a program."""
    return text[text.index("def tensor_plan"):text.index("def split_tensors")]


@lru_cache
def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = _model()
    batch = model.example_inputs()  # type: ignore[operator]
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(file: str, steps: int) -> list[float]:
    """The losses of a program, on the ranks that there are."""
    spec = importlib.util.spec_from_file_location("exported", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[float] = module.train(steps)
    return found


@pytest.mark.ranks
@parametrize_or_slow("name", ["a grid"], sorted({*CONFIGURATIONS} - {"a grid"}))
def test_the_program_has_the_losses_of_one_process(name: str, tmp_path: Path) -> None:
    made = export_plan(plan_of(CONFIGURATIONS[name]), "fsdp2")
    assert made.configuration.degrees == CONFIGURATIONS[name].degrees
    file = tmp_path / "program.py"
    file.write_text(made.text)
    split = made.configuration.degree("tensor") > 1
    assert all((style in tensor_plan(made.text)) == split for style in ("ColwiseParallel", "RowwiseParallel"))
    for losses in on_ranks(4, trained, str(file), STEPS):
        assert losses == pytest.approx(losses_of_one_process(), rel=1e-5)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_split_sequence_has_the_losses_of_one_process(tmp_path: Path) -> None:
    plan = plan_of(CONFIGURATIONS["a grid"])
    known = subject_of(plan)
    known = replace(known, pieces=tensor_pieces(plan), norms=norm_modules(known.hubs))
    file = tmp_path / "program.py"
    file.write_text(FSDP2.write(replace(CONFIGURATIONS["a grid"], sequence=True), known))
    assert "SequenceParallel" in tensor_plan(file.read_text())
    for losses in on_ranks(4, trained, str(file), STEPS):
        assert losses == pytest.approx(losses_of_one_process(), rel=1e-5)


def test_a_plan_without_a_factory_is_no_program() -> None:
    given = CONFIGURATIONS["data parallel"]
    plan = plan_of(given)
    object.__setattr__(plan, "factory", {})
    with pytest.raises(InputError, match="a program needs to know what makes the model"):
        export_plan(plan, "fsdp2")
