"""accelerate's loop with a plan does what it does without: accumulation, clipping, schedulers, metrics, states."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from loops import Classifier, alone, data, launched, loader, planned
from ranks import on_ranks
from sampling import parametrize_or_slow

from autoddl.adapters.accelerate import Accelerator
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan


def trained(accelerator: Any, folder: str, resume: bool = False) -> list[float]:
    """Losses, norms and rates of two epochs (or, resumed, of the second), and accuracies after each."""
    accelerate.utils.set_seed(5)
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, batches, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader(shuffle=True), loader(), scheduler)
    found: list[float] = []
    if resume:
        accelerator.load_state(folder)
    for epoch in range(1 if resume else 0, 2):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = model(x, y)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(float(accelerator.gather(loss.detach()).mean()))
        model.eval()
        right = 0
        for x, y in held_out:
            with torch.no_grad():
                best, labels = accelerator.gather_for_metrics((model(x, y)["logits"].argmax(-1), y))
            right += int((best == labels).sum())
        found += [right, scheduler.get_last_lr()[0]]
        if epoch == 0:
            accelerator.save_state(folder)
    return found


def compared(plan: Plan, folder: str) -> tuple[list[float], list[float], list[float]]:
    with alone():
        expected = trained(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), f"{folder}/plain")
    with launched():
        found = trained(Accelerator(plan=plan, cpu=True, gradient_accumulation_steps=2), f"{folder}/planned")
    with launched():
        again = trained(Accelerator(plan=plan, cpu=True, gradient_accumulation_steps=2), f"{folder}/planned", True)
    return expected, found, again


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["a=2"], ["a=2,b=2"])
def test_a_loop_of_accelerate_trains_evaluates_and_resumes_as_without_a_plan(tmp_path: Path, mesh: str) -> None:
    plan = planned(mesh)
    for expected, found, again in on_ranks(plan.mesh.size, compared, plan, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-9)
        assert again == pytest.approx(expected[len(expected) // 2:], rel=1e-9)


def test_what_no_plan_does_is_refused() -> None:
    plan = planned("a=1")
    with alone(), pytest.raises(InputError, match="plan with precision='bf16-mixed'"):
        Accelerator(plan=plan, cpu=True, mixed_precision="fp16")
    with alone():
        accelerator = Accelerator(plan=plan, cpu=True)
        with pytest.raises(InputError, match="one plan runs one module, and prepare was given 2"):
            accelerator.prepare(Classifier(), Classifier())
        model = Classifier().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(*data()[:8])["loss"].backward()
        optimizer.step()
        with pytest.raises(InputError, match="the optimizer has stepped"):
            accelerator.prepare(model, optimizer)
