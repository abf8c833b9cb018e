"""`verify` of plans whose keys and values go round a ring: gradients are those of one process, bytes those planned."""

from pathlib import Path

import flexible
import pytest
import zoo
from sampling import parametrize_or_slow
from verified import planned, verified

from autoddl.capture.factory import Factory
from autoddl.core.layout import Split
from autoddl.core.plan import parse_plan
from autoddl.explain.rings import ring_text
from autoddl.planner.question import rebuild

ZOO = str(Path(zoo.__file__))


@pytest.mark.ranks
@parametrize_or_slow("family,mine", [("llama", "cp=2,tp=2,ring,zero=3,recompute=full")],
                     [("llama", "cp=4,ring"), ("gpt", "cp=2,tp=2,ring"), ("gpt", "cp=4,ring,zero=1"),
                      ("bert", "cp=2,tp=2,ring")])
def test_rings_compute_what_one_process_does_and_send_what_is_planned(family: str, mine: str) -> None:
    made = Factory(ZOO, family, {"B": 3, "layers": 1})  # an odd batch
    plan = planned(made, mine=mine)
    axis = plan.mesh.names.index("cp")
    attention = [d for d in plan.decisions if "scaled_dot_product" in d.target]
    assert attention and all(layout[axis] == Split(2) for d in attention for layout in d.inputs[:3])
    assert rebuild(plan).problem.cost(rebuild(plan).choice) == pytest.approx(plan.predicted.seconds, rel=1e-12)
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@parametrize_or_slow("file,family,sizes", [(ZOO, "gpt", {"B": 3, "layers": 1})],
                     [(ZOO, "llama", {"B": 3, "layers": 1}), (flexible.__file__, "model", {"kind": "documents"}),
                      (flexible.__file__, "model", {"kind": "sinks"})])
def test_ranks_that_trade_queries_beside_all_keys_compute_what_one_process_does(file: str, family: str,
                                                                                sizes: dict[str, object]) -> None:
    made = Factory(file, family, sizes)
    plan = planned(made, mesh="machine=2,pair=2", pins=("machine=halves data", "pair=halves data"))
    assert "halves of the queries are traded" in ring_text(plan) and parse_plan(plan.to_json(), "") == plan
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "sinks", "biased"])
@pytest.mark.parametrize("mine", ["cp=4,ring,zero=1", "cp=2,tp=2,ring,recompute=full"])
def test_flexible_attention_in_a_ring_computes_what_one_process_does(kind: str, mine: str) -> None:
    made = Factory(flexible.__file__, "model", {"kind": kind})
    plan = planned(made, mine=mine)
    assert "keys and values go round a ring" in ring_text(plan)
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked
