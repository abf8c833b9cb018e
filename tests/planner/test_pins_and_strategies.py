"""Pins and strategies: what they leave of the space, and what they say when they leave nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoders
import pytest
import torch
import zoo
from shell import LAPTOP, PAIR
from torch import nn

import autoddl
from autoddl.capture.capture import capture
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import B, Mesh, Split
from autoddl.planner.pins import Pin, mesh_allows, parse_pin, pinned
from autoddl.planner.strategies import strategy
from autoddl.pricing.space import variables

MESH = Mesh.parse("net=2,node=2")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return add_hubs(capture(*zoo.gpt()).graph)


@pytest.mark.parametrize("text", ["h.*.attn.*: node=S(0)", "wte.weight: net=B", "node=8", "x: node=P",
                                  "h.*: net=OGW"])
def test_a_pin_round_trips(text: str) -> None:
    assert str(parse_pin(text)) == text


@pytest.mark.parametrize("text", ["", "node", "node=", "node=S(0)", ": node=B", "w: node=R", "w: =B"])
def test_what_is_no_pin_says_what_is(text: str) -> None:
    with pytest.raises(InputError):
        parse_pin(text)


def test_a_pin_of_the_mesh_chooses_meshes() -> None:
    assert mesh_allows((parse_pin("node=2"),), MESH)
    assert not mesh_allows((parse_pin("node=4"),), MESH)
    assert not mesh_allows((parse_pin("w: rack=B"),), MESH)


class Untouched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("captured")


@pytest.mark.parametrize("options", [{"pins": ("*: machin=S(0)",)}, {"pins": ("pair=3",)}, {"mesh": "rack=4"},
                                     {"mine": "tp=3"}])
@pytest.mark.parametrize("function", [autoddl.plan, autoddl.compare], ids=["plan", "compare"])
def test_what_no_mesh_has_is_said_before_the_model_is_captured(function: Callable[..., object],
                                                               options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        function(Untouched(), LAPTOP, torch.zeros(2, 2), **options)


def test_a_pin_holds_parameters_where_they_are_stored(graph: Graph) -> None:
    space = variables(graph, MESH, pinned((parse_pin("blocks.*.up.weight: node=S(1)"),), graph, MESH))
    for variable in space:
        pinned_here = isinstance(variable.item, Tensor) and variable.name.endswith("up.weight")
        states = {choice.outputs[0][1] for choice in variable.choices}
        assert states == {Split(1)} if pinned_here else isinstance(variable.item, Op) or len(states) > 1


def test_a_pin_says_what_is_split(graph: Graph) -> None:
    pins = tuple(map(parse_pin, ("blocks.*.up.weight: node=OGW", "blocks.*.up.weight: net=O")))
    space = variables(graph, MESH, pinned(pins, graph, MESH), microbatches=2)
    found = {c.depths for v in space if isinstance(v.item, Tensor) and v.name.endswith("up.weight") for c in v.choices}
    assert found == {(0, 2)}


def test_a_pin_holds_ops_where_they_write(graph: Graph) -> None:
    space = variables(graph, MESH, pinned((parse_pin("blocks.0.norm: net=S(1)"),), graph, MESH))
    held = [v for v in space if isinstance(v.item, Op) and v.item.module == "blocks.0.norm"]
    assert held and all(choice.outputs[0][0] == Split(1) for v in held if ".hub" not in v.name for choice in v.choices)


@pytest.mark.parametrize(("pins", "message"), [
    (("no.such.thing: node=B",), "matches no parameter"),
    (("blocks.0.up.weight: node=S(0)", "blocks.0.up.weight: node=S(1)"), "give blocks.0.up.weight two states"),
    (("blocks.0.up.weight: node=S(5)",), r"one of its dims, and blocks.0.up.weight is \[128, 32\]"),
    (("blocks.0.up.weight: node=P",), "stored as B or as S"),
    (("blocks.0.up.weight: node=OW",), "weights are split only where gradients are"),
    (("blocks.0.up.weight: node=B", "blocks.0.up.weight: node=OG"), "contradict each other"),
    (("blocks.0.up.weight: node=OG", "blocks.0.up.weight: node=B"), "contradict each other"),
    (("blocks.0.up.weight: node=O", "blocks.0.up.weight: node=OG"), "give blocks.0.up.weight two states"),
    (("blocks.0.norm: node=P",), "leave no layout for")])
def test_pins_that_leave_nothing_say_where(graph: Graph, pins: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        variables(graph, MESH, pinned(tuple(map(parse_pin, pins)), graph, MESH))


class Masked(nn.Module):
    """A mask that depends on no parameter, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask, self.idle = nn.Linear(8, 8), nn.Softplus(), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.linear(x) * self.mask(x)).sum()
        return loss


@pytest.mark.parametrize("pin", ["mask: node=S(0)", "idle: node=S(0)"])
def test_a_pin_of_what_every_rank_has_alike_is_refused(pin: str) -> None:
    graph = add_hubs(capture(Masked(), (torch.zeros(4, 8),)).graph)
    with pytest.raises(InputError, match=f"pin '{re.escape(pin)}' matches only what every rank computes or holds"):
        pinned((parse_pin(pin),), graph, MESH)
    whole, pins = variables(graph, MESH), tuple(map(parse_pin, (pin.replace("S(0)", "B"), "linear.bias: node=B")))
    assert [v.name for v in variables(graph, MESH, pinned(pins, graph, MESH))] == [v.name for v in whole]


def _parameters(graph: Graph, roles: dict[str, str]) -> list[str]:
    found = []
    for variable in variables(graph, MESH, strategy(graph, MESH, roles)):
        if isinstance(variable.item, Tensor):
            found += [str(choice.outputs[0]) for choice in variable.choices]
    return found


def test_data_parallel_stores_whole_parameters(graph: Graph) -> None:
    assert set(_parameters(graph, {"net": "data", "node": "data"})) == {"B B"}


def test_zero_cuts_every_parameter_that_can_be_cut(graph: Graph) -> None:
    assert all("B" not in text for text in _parameters(graph, {"net": "zero", "node": "zero"}))


@pytest.mark.parametrize(("role", "depths"), [("zero-1", {0}), ("zero-2", {0, 1}), ("zero-3", {0, 1, 2})])
def test_a_role_says_how_much_is_split(graph: Graph, role: str, depths: set[int]) -> None:
    """The tied weight keeps what was gathered, whatever the role."""
    for v in variables(graph, MESH, strategy(graph, MESH, {"net": role, "node": "data"}), microbatches=2):
        if isinstance(v.item, Tensor):
            assert {c.depths[0] for c in v.choices if c.outputs[0][0] != B} <= depths
            assert all(c.outputs[0][1] == B for c in v.choices)


def test_every_op_reads_whole_parameters_in_data_and_zero(graph: Graph) -> None:
    names = {t.name for t in graph.tensors if t.fqn.endswith("weight") or t.fqn.endswith("bias")}
    for role in ("data", "zero"):
        for variable in variables(graph, MESH, strategy(graph, MESH, {"net": role, "node": role})):
            if isinstance(variable.item, Op):
                for k, t in enumerate(variable.item.inputs):
                    if graph.tensors[t].name in names:
                        assert all(set(choice.inputs[k]) == {B} for choice in variable.choices)


def test_tensor_parallel_does_not_split_the_batch(graph: Graph) -> None:
    batch = 4
    for variable in variables(graph, MESH, strategy(graph, MESH, {"net": "tensor", "node": "data"})):
        if isinstance(variable.item, Op) and not variable.item.target.startswith("autoddl"):
            for choice in variable.choices:
                for t, layout in zip(variable.item.outputs, choice.outputs, strict=True):
                    if graph.tensors[t].shape[:1] == (batch,):
                        assert layout[0] != Split(0)


def test_pins_are_values() -> None:
    assert Pin("w", "node", B) == parse_pin("w: node=B")


@pytest.mark.parametrize("role", ["data", "zero"])
def test_where_parameters_are_read_whole_the_batch_is_split(graph: Graph, role: str) -> None:
    """On the axes of that role, and where there are enough of it."""
    weights = {t for t, tensor in enumerate(graph.tensors) if tensor.fqn.endswith("weight")}
    behind = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.target.startswith("autoddl")}
    for roles, axes in (({"net": role, "node": role}, (0, 1)), ({"net": role, "node": "tensor"}, (0,))):
        linears = [v for v in variables(graph, MESH, strategy(graph, MESH, roles)) if isinstance(v.item, Op)
                   and v.item.target == "aten.linear.default"
                   and any(behind.get(t, t) in weights for t in v.item.inputs)]
        assert linears and all(choice.inputs[0][a] == Split(0) for v in linears for choice in v.choices for a in axes)


def test_a_decoder_under_data_parallelism_sends_no_activations(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(PAIR)
    model, x = decoders.decoder(width=16, size=16, batch=16)
    found = {row.name: row.plan for row in autoddl.compare(model, tmp_path / "two.yaml", x, mesh="net=2")}
    plan = found["data parallel"]
    assert plan is not None and not plan.predicted.fallback
    sent = [c for c in plan.conversions if any("B->S" not in step for step in (*c.forward, *c.backward))]
    assert sent and [c for c in sent if not c.tensor.startswith("p_") and c.op != "output"] == []
