"""Stages that send each other coded messages compute what they do without, but for the error of the codec."""

from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from staged_plans import even_cuts, staged_plan
from torch import Tensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import parted
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.launch.check import mismatches
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.stage_lanes import lanes_of

PARTS = 2
ERROR = {"bfloat16": 2e-2, "int16": 1e-3, "int8": 0.1}


@shared
def captured(name: str) -> Captured:
    module, sample = zoo.named(name, B=8)
    return capture(module, parted(sample, PARTS))


def coded(name: str, schedule: str, mesh: str, codec: str) -> Plan:
    """A plan of two stages that sends everything that flows between them as `codec`."""
    graph = captured(name).graph
    plan = staged_plan(captured(name), even_cuts(graph, 2), schedule, mesh, PARTS)
    assert plan.pipeline is not None
    lanes = tuple(f"{lane} as {codec}" for lane in lanes_of(plan, graph)
                  if lane.way in ("forward", "backward") and lane.tensor.dtype == "float32")
    return replace(plan, pipeline=replace(plan.pipeline, coded=lanes))


def gradients(name: str, plan: Plan) -> tuple[dict[str, Tensor], list[str], int]:
    """A step: gradients of this rank, what was sent otherwise than planned, and bytes sent to other stages."""
    module, sample = zoo.named(name, B=8)
    parallel = parallelize(module, plan, captured=captured(name))
    parallel.step(sample.kwargs or sample.args)
    found = {n: getattr(p.grad, "_local_tensor", p.grad) for n, p in parallel.named_parameters() if p.grad is not None}
    sent = sum(one.nbytes for one in parallel.recorder.executed if one.kind == "send")
    return {n: g.clone() for n, g in found.items()}, mismatches(parallel), sent


def case(name: str, plan: Plan) -> dict[str, object]:
    with_, wrong, sent = gradients(name, plan)
    without, _, plain = gradients(name, plan.without_codecs())
    largest = max(float(g.abs().max()) for g in without.values())
    error = max(float((with_[n] - without[n]).abs().max()) for n in without)
    return {"wrong": wrong, "error": error / largest, "sent": (sent, plain)}


@pytest.mark.ranks
@parametrize_or_slow("name,schedule,mesh,codec", [("gpt", "1f1b", "node=2", "int8")], [
    ("gpt", "gpipe", "node=2", "bfloat16"), ("t5", "1f1b", "one=1", "int16"), ("llama", "zb-h1", "node=2", "bfloat16")])
def test_coded_stages_are_as_without_but_for_the_error_of_the_codec(name: str, schedule: str, mesh: str, codec: str
                                                                   ) -> None:
    plan = coded(name, schedule, mesh, codec)
    assert plan.codecs == (codec,) and not plan.without_codecs().codecs
    for rank, found in enumerate(on_ranks(plan.mesh.size, case, name, plan)):
        assert not found["wrong"] and 1e-9 < found["error"] <= ERROR[codec], f"rank {rank}: {found}"
        assert found["sent"][0] < 0.8 * found["sent"][1], f"rank {rank}: {found}"


def test_a_plan_with_a_lane_that_is_none_is_refused() -> None:
    plan = coded("gpt", "1f1b", "node=2", "int8")
    for text in ("forward nothing 0 -> 1 as int8", f"{lanes_of(plan, captured('gpt').graph)[0]} as lossless"):
        pipeline = replace(plan.pipeline, coded=(text,))  # type: ignore[type-var]
        with pytest.raises(InputError, match="plan again instead of editing the file"):
            lanes_of(replace(plan, pipeline=pipeline), captured("gpt").graph)


def test_codecs_of_lanes_are_written_and_read(tmp_path: Path) -> None:
    plan = coded("gpt", "1f1b", "node=2", "int8")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").pipeline == plan.pipeline
    assert '"coded"' not in plan.without_codecs().to_json()
