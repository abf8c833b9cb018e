"""Configurations in the text of every target: written, read back, and taken as they are where they are published."""

import random
import re
from dataclasses import replace

import pytest
from worded import WordedModel

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import generate
from autoddl.export.configuration import DATA_ROLES, Configuration, Degree
from autoddl.export.exported import TARGETS, import_text
from autoddl.export.megatron import layers_of_layout, layout_of_layers
from autoddl.export.nearest import is_expressible, nearest_configuration, schedule_kind
from autoddl.export.target import Target

READ = [one for one in TARGETS.values() if one.read is not None]
SIZES = (1, 2, 3, 4, 8, 16)


def _drawn(draw: random.Random, target: Target) -> tuple[Configuration, WordedModel]:
    """A configuration, and a model of as many blocks as its stages have; near to what the target has."""
    roles = draw.choice([*target.limits.data, *((one, other) for one in DATA_ROLES for other in DATA_ROLES)])
    grid = [*(Degree(role, draw.choice(SIZES)) for role in roles), Degree("tensor", draw.choice(SIZES))]
    if target.limits.context and draw.random() < 0.3:
        grid.insert(-1, Degree("context", 2))
    stages = draw.choice((1, 1, 2, 4)) if target.limits.stages else 1
    schedule = draw.choice(("1f1b", "gpipe", "interleaved:2", "interleaved:3", "zb-v", "dualpipe-v", "zb-h1"))
    chunks = len(generate(schedule, 4, 8).placement[0]) // 4 if stages > 1 else 1
    layers = tuple(draw.randint(0, 3) + (s == 1) for s in range(stages * chunks)) if draw.random() < 0.5 else ()
    made = Configuration(
        tuple(grid), draw.choice((1, 2, 5)), stages * draw.choice((2, 4)), stages, schedule if stages > 1 else "1f1b",
        layers if stages > 1 else (), grid[-1].size > 1 and draw.random() < 0.5, 1,
        draw.choice(("float32", "bf16-mixed", "bf16", "bf16-mixed,reduce=bfloat16")),
        draw.choice(("none", "full", "selective", "first-3", "every-2", "first-2:selective", "h.1+h.2")))
    return made, WordedModel(sum(made.layers) or stages * chunks * 2)


@pytest.mark.parametrize("target", READ, ids=lambda one: one.name)
def test_what_a_target_has_is_read_as_it_was_written(target: Target) -> None:
    draw, tried, read = random.Random(0), 0, target.read
    assert read is not None
    for _ in range(600):
        given, model = _drawn(draw, target)
        try:
            near = nearest_configuration(given, target)
        except InputError:
            continue
        for policy in near.policies:
            made = replace(near.configuration, recompute=policy)
            assert is_expressible(made, target), made
            assert read(target.write(made, model), made.ranks) == made
            tried += 1
        assert bool(near.lost) == (near.configuration != given or len(near.policies) > 1)
    assert tried > 150


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda one: one.name)
def test_the_nearest_keeps_ranks_rows_and_microbatches(target: Target) -> None:
    draw, tried = random.Random(1), 0
    for _ in range(200):
        given, _ = _drawn(draw, target)
        try:
            made = nearest_configuration(given, target).configuration
        except InputError as error:
            assert re.search("has no|cannot", str(error))
            continue
        tried += 1
        assert (made.ranks, made.rows, made.microbatches, made.stages) == (
            given.ranks, given.rows, given.microbatches, given.stages)
        assert made.stages == 1 or schedule_kind(made.schedule) in target.limits.schedules
    assert tried > 30


def test_layouts_of_pipelines_are_those_of_megatron() -> None:
    """The examples of its own documentation, and what is written reads back."""
    assert layers_of_layout("Et*3|(tt|)*29,L") == (3, *[2] * 29, 0)
    assert layout_of_layers((0, 4, 4, 4, 3)) == "E|(t*4|)*3t*3L"
    draw = random.Random(2)
    for _ in range(200):
        layers = tuple(draw.randint(0, 4) for _ in range(draw.randint(2, 9)))
        assert layers_of_layout(layout_of_layers(layers)) == layers
    with pytest.raises(InputError, match="is no layout of a pipeline"):
        layers_of_layout("ttt|ttL")


BAD = {
    "--tensor-model-paralel-size 8": "did you mean '--tensor-model-parallel-size'",
    "--tensor-model-parallel-size eight": "is 'eight'; it is a whole number, at least 1",
    "--tensor-model-parallel-size 3": "64 ranks are no multiple of tensor 3",
    "--sequence-parallel yes": "takes no value",
    "tensor 8": "is no flag",
    "--micro-batch-size 3 --global-batch-size 8": "no multiple of --micro-batch-size 3 x 64",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grad": "did you mean 'optim_grads'",
    "--num-distributed-optimizer-instances 5": "does not divide the 64 ranks",
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|tL": "which 4 ranks do not share evenly",
    "--fp16": "no recipe of precision",
    "--lr '1": "these are no flags",
}


@pytest.mark.parametrize("text", BAD)
def test_flags_that_are_wrong_say_what_to_write(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(BAD[text])):
        import_text(text, "megatron", 64)


def test_flags_that_do_not_say_how_many_ranks_there_are_ask_for_it() -> None:
    with pytest.raises(InputError, match="give the cluster, or --devices N"):
        import_text("--tensor-model-parallel-size 8", "megatron")


def test_an_unknown_target_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"there is no target 'megatorn'.*did you mean 'megatron'"):
        import_text("", "megatorn")
