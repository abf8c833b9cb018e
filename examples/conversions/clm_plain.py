"""A causal language model trained as transformers' run_clm does it, with a text and a tokenizer that need no network.

Run: python examples/conversions/clm_plain.py --output_dir out --num_train_epochs 2
"""

import json
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    """Sizes of the model."""

    layers: int = field(default=2)
    width: int = field(default=32)


@dataclass
class DataArguments:
    """The text."""

    block_size: int = field(default=16)
    words: int = field(default=300)


def tokenized(data: DataArguments) -> list[dict[str, list[int]]]:
    lines = [" ".join(str(number * number % 97) for number in range(start, start + 10))
             for start in range(data.words // 10)]
    return [{"input_ids": list(line.encode())} for line in lines]


def group_texts(examples: list[dict[str, list[int]]], block_size: int) -> list[dict[str, list[int]]]:
    ids = list(chain(*(one["input_ids"] for one in examples)))
    total = len(ids) // block_size * block_size
    blocks = [ids[i:i + block_size] for i in range(0, total, block_size)]
    return [{"input_ids": block, "labels": list(block)} for block in blocks]


def compute_metrics(found: Any) -> dict[str, float]:
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    blocks = group_texts(tokenized(data_args), data_args.block_size)
    train_dataset, eval_dataset = blocks[:-10], blocks[-10:]

    config = GPT2Config(n_layer=model_args.layers, n_embd=model_args.width, n_head=2, vocab_size=128,
                        n_positions=data_args.block_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        bos_token_id=0, eos_token_id=0, use_cache=False)
    model = GPT2LMHeadModel(config)

    trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset, eval_dataset=eval_dataset,
                      compute_metrics=compute_metrics)

    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        found = [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss", "eval_accuracy")
                 if key in row]
        Path(training_args.output_dir, "losses.json").write_text(json.dumps([*found, metrics["perplexity"]]))


if __name__ == "__main__":
    main()
