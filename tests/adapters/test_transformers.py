"""The Trainer of transformers with a plan does what it does without: logs, evaluation, checkpoints, resuming."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loops import alone, launched
from planmaker import cluster_of
from ranks import on_ranks, shared

import autoddl
from autoddl.adapters.transformers import Trainer
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan

ROWS, WORLD = 4, 2


def built() -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0)).double()


def rows() -> list[dict[str, torch.Tensor]]:
    """Twenty-two rows; some labels are left out."""
    ids = torch.randint(0, 32, (22, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::3, 4:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


@shared
def planned() -> Plan:
    sample = {name: torch.stack([row[name] for row in rows()[:ROWS]]) for name in ("input_ids", "labels")}
    return autoddl.plan(built(), cluster_of("a=2"), {**sample, "use_cache": False}, mesh="a=2",
                        pins=("transformer.wte.weight: a=S(1)", "transformer.h.*.mlp.*.weight: a=S(0)"))


def arguments(folder: str, world: int, **options: Any) -> Any:
    return transformers.TrainingArguments(
        folder, per_device_train_batch_size=ROWS // world, per_device_eval_batch_size=ROWS // world, num_train_epochs=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=1, logging_steps=1,
        use_cpu=True, report_to=[], eval_strategy="epoch", save_strategy="epoch", disable_tqdm=True, max_grad_norm=0.5,
        weight_decay=0.1, load_best_model_at_end=True, seed=3, **options)


def right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())}


def trained(trainer: Any, resume: str | None = None) -> list[dict[str, float]]:
    trainer.train(resume_from_checkpoint=resume)
    timed = ("runtime", "per_second", "flos", "preparation")
    found = [{key: value for key, value in row.items() if not any(word in key for word in timed)}
             for row in trainer.state.log_history]
    return [row for row in found if not resume or "train_loss" not in row]  # that of a part of the training alone


def compared(plan: Plan, folder: str) -> Any:
    given: dict[str, Any] = {"train_dataset": rows(), "eval_dataset": rows()[:10], "compute_metrics": right}
    plain = f"{folder}/plain{torch.distributed.get_rank()}"
    with alone():
        expected = trained(transformers.Trainer(model=built(), args=arguments(plain, 1), **given))
    with launched():
        trainer: Any = Trainer(model=built(), args=arguments(f"{folder}/planned", WORLD), plan=plan, **given)
        found = trained(trainer)
        module = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/planned/checkpoint-6", dtype=torch.float64)
        ids = torch.stack([row["input_ids"] for row in rows()[:ROWS]])
        with torch.no_grad():
            best = Path(trainer.state.best_model_checkpoint).name == "checkpoint-6"
            error = float((trainer.model.eval()(input_ids=ids, labels=ids).logits - module(input_ids=ids).logits
                           ).abs().max()) if best else 0.0
    with launched():
        trainer = Trainer(model=built(), args=arguments(f"{folder}/planned", WORLD), plan=plan, **given)
        again = trained(trainer, f"{folder}/planned/checkpoint-3")
    return expected, found, again, error


@pytest.mark.ranks
def test_the_trainer_logs_evaluates_saves_and_resumes_as_without_a_plan(tmp_path: Path) -> None:
    for expected, found, again, error in on_ranks(WORLD, compared, planned(), str(tmp_path)):
        assert error < 1e-12
        assert [row.keys() for row in found] == [row.keys() for row in expected]
        for mine, theirs in zip((*found, *again), (*expected, *expected[:-1]), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6), (mine, theirs)


def test_losses_outside_of_the_model_are_refused(tmp_path: Path) -> None:
    with alone(), pytest.raises(InputError, match="compute it in the model's forward"):
        Trainer(built(), arguments(str(tmp_path), 1, label_smoothing_factor=0.1), plan=planned())
