"""Products in float8: which are narrow, what their casts move, and that bounds stay below."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.api import plan
from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh
from autoddl.cost_models import (
    Cluster,
    Kernel,
    copy_seconds,
    elementwise_seconds,
    kernel_seconds,
    load_device,
    parse_cluster,
)
from autoddl.cost_models.machine import Level
from autoddl.cost_models.software import SOFTWARE, run_by
from autoddl.operators.expert_rows import expert_products
from autoddl.operators.narrow_products import CAST, PADDED, SCALED, TURNED, narrow_products
from autoddl.pricing.floors import floor_seconds
from autoddl.pricing.kernel_prices import Kernels, pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice

TOKENS, WIDTH = 8192, 4096
PLACE = Cluster("h100", load_device("H100-80GB"), (Level("node", 1, 450e9, 3e-6),), "nccl")
DELAYED = run_by(PLACE, replace(SOFTWARE["nemo"], narrow="float8_e4m3fn"))
CURRENT = run_by(PLACE, replace(SOFTWARE["megatron-bridge"], narrow="float8_e4m3fn"))


class Small(nn.Module):
    """A norm, two products with weights, one without, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        done: Tensor = self.head(F.softmax(y @ y.T, -1) @ y).square().mean()
        return done


def pricing(place: Cluster) -> Pricing:
    with torch.device("meta"):
        graph = capture(Small().to(torch.bfloat16), (torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16),)).graph
    return Pricing(add_hubs(graph), Mesh.parse("node=1"), place)


def passes(made: Pricing, module: str) -> tuple[float, float]:
    op = next(op for op in made.graph.ops if op.module == module)
    whole = Layout.broadcast(made.mesh)
    forward, backward = pass_seconds(made, op, Choice((whole,) * len(op.inputs), (whole,), (), ()),
                                     made.graph.differentiable())
    return sum(forward), sum(backward)


def test_products_with_weights_are_narrow_but_for_the_head() -> None:
    made = pricing(DELAYED)
    found = {op.module: made.narrow[op.name] for op in made.graph.ops if op.name in made.narrow}
    assert {name: (cast.places, cast.normed) for name, cast in found.items()} == {
        "up": ((0,), True), "down": ((0,), False)}
    assert narrow_products(made.graph) == made.narrow and not pricing(PLACE).narrow


def test_a_narrow_product_has_the_rate_of_its_dtype_and_moves_what_it_casts() -> None:
    flops, shape = 2.0 * TOKENS * WIDTH * WIDTH, (1, TOKENS, WIDTH, WIDTH)
    moved = 2.0 * (2 * TOKENS * WIDTH + WIDTH * WIDTH)
    product = kernel_seconds(DELAYED.device, Kernel("matmul", shape, flops, moved, "float8_e4m3fn", "matmul"))
    for place, each in ((DELAYED, CAST), (CURRENT, CAST + SCALED)):
        forward, backward = passes(pricing(place), "down")
        cast = elementwise_seconds(place.device, float(each * TOKENS * WIDTH))
        assert forward == pytest.approx(product + cast)
        plain = passes(pricing(run_by(PLACE, SOFTWARE["nemo"])), "down")[1]
        assert plain / 2 < backward < plain / 2 + 1.5 * cast


class Experts(nn.Module):
    """Two matrices for each of four experts with a gate between, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(4, WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.head(F.silu(x @ self.up) @ self.down).square().mean()
        return done


def test_rows_of_experts_are_padded_once_and_the_padding_is_taken_out_once() -> None:
    with torch.device("meta"):
        graph = capture(Experts().to(torch.bfloat16), (torch.zeros(4, 2048, WIDTH, dtype=torch.bfloat16),)).graph
    made = Pricing(add_hubs(graph), Mesh.parse("node=1"), DELAYED)
    values = 4.0 * 2048 * WIDTH
    assert [cast.padded for cast in made.narrow.values()] == [values, values]
    op = next(op for op in made.graph.ops if op.name in made.narrow)
    whole, bare = Layout.broadcast(made.mesh), Kernels.of(made, op, made.graph.differentiable())
    bare = replace(bare, cast=made.narrow[op.name]._replace(padded=0.0))
    choice = Choice((whole,) * len(op.inputs), (whole,), (), ())
    more = copy_seconds(DELAYED.device, PADDED * values)
    inputs, outputs = (tuple(made.graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs))
    for padded, plain in zip(pass_seconds(made, op, choice, made.graph.differentiable()), bare.seconds(inputs, outputs),
                             strict=True):
        assert sum(padded) - sum(plain) == pytest.approx(more)


class Gated(nn.Module):
    """Experts whose gate and what it gates are one product or two, and matrices for each head of a row."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.ups = nn.ParameterList(torch.empty(4, 32, 64 if apart else 128) for _ in range(1 + apart))
        self.down, self.heads = nn.Parameter(torch.empty(4, 64, 32)), nn.Parameter(torch.empty(4, 8, 8))
        self.each = nn.Parameter(torch.empty(4, 32, 8))
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = [x @ up for up in self.ups] if len(self.ups) > 1 else (x @ self.ups[0]).chunk(2, -1)
        y = ((F.silu(gate) * up) @ self.down).softmax(-1).flatten(0, 1)
        z = (y.unflatten(-1, (4, 8)).transpose(0, 1) @ self.heads).transpose(0, 1).flatten(1).softmax(-1)
        done: Tensor = self.head(torch.einsum("td,hde->the", z, self.each).flatten(1)).square().mean()
        return done


def test_rows_are_padded_once_where_the_gate_is_a_product_of_its_own_and_heads_are_not() -> None:
    for apart in (False, True):
        with torch.device("meta"):
            graph = capture(Gated(apart).to(torch.bfloat16), (torch.zeros(4, 16, 32, dtype=torch.bfloat16),)).graph
        padded = [cast.padded for cast in narrow_products(add_hubs(graph)).values()]
        assert len(padded) == 4 + apart and sorted(padded)[-3:] == [0.0, 2048.0, 2048.0]


class Heads(nn.Module):
    """A matrix for each head, whose rows were cut from longer ones and turned since, and one for each of four experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.heads, self.experts = nn.Parameter(torch.empty(4, 8, 8)), nn.Parameter(torch.empty(4, 32, 32))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        rows = F.normalize(self.first(x).unflatten(-1, (4, 8)).transpose(0, 1) * turn, dim=-1)
        y = (rows @ self.heads).transpose(0, 1).flatten(1)
        done: Tensor = self.head((y * 2).unflatten(0, (4, 16)) @ self.experts).square().mean()
        return done


def test_heads_are_no_experts_whatever_was_computed_on_their_rows() -> None:
    with torch.device("meta"):
        x, turn = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(64, 8, dtype=torch.bfloat16)
        graph = add_hubs(capture(Heads().to(torch.bfloat16), (x, turn)).graph)
    found = expert_products(graph)
    assert [graph.tensors[one.matrices].fqn for one in found.values()] == ["experts"]
    assert [(one.first, one.last) for one in found.values()] == [(True, True)]


def test_ranks_that_share_a_product_cast_a_part_each_and_transpose_the_rest() -> None:
    four = replace(DELAYED, levels=(replace(DELAYED.levels[0], size=4),))
    with torch.device("meta"):
        graph = capture(Small().to(torch.bfloat16), (torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16),)).graph
    made = Pricing(add_hubs(graph), Mesh.parse("node=4"), four)
    down = next(op for op in made.graph.ops if op.module == "down")
    shapes = [made.graph.tensors[t].shape for t in (*down.inputs, *down.outputs)]
    whole, rows = TOKENS * WIDTH, [(TOKENS // 4, WIDTH), shapes[1], (TOKENS // 4, WIDTH)]
    columns = [shapes[0], (WIDTH // 4, WIDTH), (TOKENS, WIDTH // 4)]
    kernels = Kernels.of(made, down, made.graph.differentiable())
    for pieces, moved in ((rows, CAST * whole / 4), (columns, CAST * whole / 4 + TURNED * 3 * whole / 4)):
        batch = (1, pieces[0][0], pieces[2][1], WIDTH)
        alone = Kernel("matmul", batch, 2.0 * prod(batch), 2.0 * sum(map(prod, pieces)), "float8_e4m3fn", "matmul")
        forward = kernels.seconds(tuple(pieces[:2]), (pieces[2],))[0]
        assert sum(forward) == pytest.approx(kernel_seconds(four.device, alone)
                                             + elementwise_seconds(four.device, moved))


def test_a_norm_by_hand_writes_the_cast_where_the_scale_is_known_before() -> None:
    up, down = (passes(pricing(DELAYED), name)[0] for name in ("up", "down"))
    assert down - up == pytest.approx(elementwise_seconds(DELAYED.device, float(CAST * TOKENS * WIDTH)))
    eager = run_by(PLACE, replace(SOFTWARE["eager"], narrow="float8_e4m3fn"))
    assert passes(pricing(eager), "up")[0] == passes(pricing(eager), "down")[0]
    assert passes(pricing(CURRENT), "up")[0] == passes(pricing(CURRENT), "down")[0]
    head = [passes(pricing(place), "head") for place in (DELAYED, run_by(PLACE, SOFTWARE["nemo"]))]
    assert head[0] == head[1]


def test_the_floor_and_the_bound_of_a_plan_stay_below_it() -> None:
    with torch.device("meta"):
        model, x = Small().to(torch.bfloat16), torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    for place in (PLACE, DELAYED, CURRENT):
        made = plan(model, place, (x,))
        assert floor_seconds(pricing(place).graph, place) <= made.predicted.compute
        assert made.bound == pytest.approx(made.predicted.seconds)
        assert parse_cluster(made.source["cluster"], "the plan's") == place


def test_what_a_program_does_is_no_other_machine() -> None:
    """But for how far fused attention gets, which is a figure of the device."""
    here, there = (run_by(PLACE, replace(SOFTWARE[name], narrow="float8_e4m3fn", attention="best"))
                   for name in ("nemo", "megatron-bridge"))
    assert here.fingerprint == there.fingerprint == PLACE.fingerprint
