"""Counts the kinds of blocks of found plans: 20 transformers and clusters, without a budget, under one, and in stages.

    python examples/benchmarks/regular_plans.py [NAME ...]

Blocks are of one kind where all that a plan decides in them is the same: layouts that ops read and write, how weights
are stored, and what backward computes again. A stage of an encoder and a decoder has two kinds at least. Models take no
memory (the meta device). The budget is 0.9 of the peak of the plan without one; a plan in stages has two of them.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import autoddl
from autoddl.capture.factory import Factory
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of
from autoddl.cost_models import Cluster, load_cluster
from autoddl.planner.options import Options

EXAMPLES = Path(__file__).parent.parent
Made = tuple[nn.Module, object]


def of_examples(name: str, **settings: Any) -> Made:
    """A model of a file of examples, without memory."""
    model, sample, _ = Factory.parse(f"{EXAMPLES / name.partition(':')[0]}.py:{name.partition(':')[2]}",
                                     settings).shaped()
    return model, sample


def of_transformers(family: str, batch: int = 32, length: int = 512, head: str = "ForCausalLM", **config: Any) -> Made:
    """A model of transformers by its family, without memory."""
    import transformers

    kind = getattr(transformers, f"{family}{head}")
    with torch.device("meta"):
        model = kind(getattr(transformers, f"{family}Config")(**config, use_cache=False))
        ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


SMALL: dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                         "intermediate_size": 3072}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt": lambda: of_examples("gpt:gpt", layers=8),
    "gpt-2 small": lambda: of_examples("gpt:gpt2_small", batch=32),
    "llama-3 8b": lambda: of_examples("llama:llama3_8b", layers=32),
    "mixture": lambda: of_examples("mixture:mixture", layers=8),
    "dit-xl": lambda: of_examples("diffusion:dit_xl"),
    "whisper": lambda: of_examples("speech:speech", layers=6, width=512, heads=8),
    "two towers": lambda: of_examples("two_towers:two_towers", layers=6, width=256),
    "bert": lambda: of_transformers("Bert", head="ForMaskedLM", **SMALL),
    "neox": lambda: of_transformers("GPTNeoX", vocab_size=50304, **SMALL),
    "qwen2": lambda: of_transformers("Qwen2", **SMALL, num_key_value_heads=4, vocab_size=32000)}
CLUSTERS = {
    "gpt": ("laptop", "two-racks-10g"), "gpt-2 small": ("a100-4x8", "two-racks-10g"),
    "llama-3 8b": ("h100-8x8", "h100-4x4x4"), "mixture": ("h100-8x8", "a100-4x8"),
    "dit-xl": ("a100-4x8", "piz-daint"), "whisper": ("laptop", "two-a100-pcie"),
    "two towers": ("laptop", "a100-4x8"), "bert": ("a100-4x8", "two-racks-10g"), "neox": ("a100-4x8", "h100-8x8"),
    "qwen2": ("two-a100-pcie", "h100-8x8")}


def kinds_of(plan: Plan) -> int:
    """How many different blocks a plan without stages has, by all that is decided in them."""
    graph, found = add_hubs(graph_from_text(plan.source["graph"])), set()
    decisions, levels = plan.index().decisions, {name.partition(":")[0]: name for name in plan.recompute}
    for block in blocks_of(graph):
        ops = [decisions.get(op.name) for op in graph.ops[block.start:block.end]]
        found.add((tuple((one.inputs, one.outputs, one.gradient) if one else None for one in ops),
                   tuple((one.fqn.removeprefix(block.name), one.layout, one.split) for one in plan.stored
                         if one.fqn.startswith(f"{block.name}.")),
                   levels[block.name].removeprefix(block.name) if block.name in levels else "none"))
    return len(found)


def most_kinds(plan: Plan) -> int:
    """The most kinds of blocks of a stage."""
    return max(map(kinds_of, [plan] if plan.pipeline is None else [one.plan for one in plan.pipeline.stages]))


def row(name: str, made: Made, place: Cluster, what: str, options: Options) -> Plan | None:
    """Plans, and prints a row of the table."""
    began = perf_counter()
    try:
        plan = autoddl.plan(made[0], place, made[1], **options)
    except (Infeasible, InputError) as error:
        print(f"| {name} | {place.name} | {what} | no plan: {str(error)[:90]} | | | | |", flush=True)
        return None
    kinds, stages = most_kinds(plan), 1 if plan.pipeline is None else len(plan.pipeline.stages)
    good = "yes" if kinds <= 3 and plan.gap <= 1e-3 else "no"
    print(f"| {name} | {place.name} | {what} | {stages} | {kinds} | {plan.gap:.4%} | {good} | "
          f"{perf_counter() - began:.1f} |", flush=True)
    return plan


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--stages", action="store_true", help="plans of two stages too")
    given = parser.parse_args()
    print("| model | cluster | asked | stages | kinds of blocks | gap | at most 3, within 0.1 % | seconds |\n"
          "|---|---|---|---|---|---|---|---|")
    for name in given.names:
        made = MODELS[name]()
        for file in CLUSTERS[name]:
            place = load_cluster(EXAMPLES / "clusters" / f"{file}.yaml")
            free = row(name, made, place, "no budget", {"workers": 1})
            if free is not None:
                row(name, made, place, "0.9 of the peak", {"workers": 1, "budget": 0.9 * free.predicted.peak_bytes})
            if given.stages:
                row(name, made, place, "2 stages", {"workers": 1, "stages": (2,), "microbatches": (4,),
                                                    "stages_limit": 20.0, "max_axes": 2})


if __name__ == "__main__":
    main()
