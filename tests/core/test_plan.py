"""Plan files: an edited one is refused with one error that names the file, the conversion and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan

RECORDED = sorted((Path(__file__).parent.parent / "plans").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_plans_on_record_are_read(path: Path) -> None:
    assert load_plan(path).conversions


@pytest.mark.parametrize(("edits", "error"), [
    ({"forward": []}, r"the forward steps of .* \(none\) do not lead from .* to .* on mesh "),
    ({"backward": []}, r"the backward steps of .* do not lead from "),
    ({"target": "S(0) B"}, r"the forward steps of .* do not lead from .* to S\(0\) B"),
    ({"forward": ["elsewhere: S(0)->B"]}, "elsewhere"),
    ({"forward": ["all-gather"]}, "'all-gather' is no step"),
    ({"gradient": None}, "has backward steps, but no layouts of a gradient"),
], ids=["no forward steps", "no backward steps", "another target", "an axis that is not there", "no step",
        "no gradient"])
def test_an_edited_conversion_is_refused(tmp_path: Path, edits: dict[str, Any], error: str) -> None:
    data = json.loads((RECORDED[0].parent / "mixture-two-racks-10g.json").read_text())
    edge = next(edge for edge in data["conversions"] if edge["forward"] and edge["backward"])
    edge.update(edits)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"{path.name} is no plan: .*{error}.*plan again instead of editing"):
        load_plan(path)
