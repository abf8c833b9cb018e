"""Sparse sums are priced as they are sent, and taken where they are faster."""

from itertools import combinations, product

import pytest
from planmaker import cluster_of

from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.layout import B, Layout, Mesh, P
from autoddl.core.sparse import RENEWED, SPARSE, SparseRule, entries
from autoddl.cost_models import collective, sent_bytes
from autoddl.pricing.price import Pricing, routes_of, steps_of
from autoddl.pricing.sparse_routes import sparse_seconds, sparse_steps

MESH = Mesh.parse("net=2,node=4")
WEIGHT = Tensor("w", (64, 96), "float32", Kind.PARAMETER, "w")


def pricing() -> Pricing:
    return Pricing(Graph((WEIGHT,), (), ()), MESH, cluster_of("net=2,node=4"), sparse="0.01")


def test_the_cheapest_way_to_a_sparse_sum_is_that_of_all_ways() -> None:
    """Against every set of axes that is summed sparse, with everything else converted before."""
    made, gradient = pricing(), WEIGHT.gradient
    routes, found = routes_of(made, gradient, "gradients"), sparse_seconds(made, gradient)
    for source, target in product(routes.layouts, routes.layouts):
        best = float("inf")
        for axes in (one for size in (1, 2) for one in combinations(range(2), size)):
            if all(source[a] == P and target[a] == B for a in axes):
                middle = target.replace(axes, P)
                step = Step(axes, P, B, SparseRule(0.01).codec)
                nbytes = int(routes.nbytes[routes.index[middle]])
                best = min(best, float(routes.seconds[routes.index[source], routes.index[middle]])
                           + made.bucket_seconds(step, nbytes, 0))
        assert found[routes.index[source], routes.index[target]] == pytest.approx(best, rel=1e-12)
        if best < float("inf"):
            *before, last = sparse_steps(made, gradient, source, target)
            assert last.is_sparse and not any(step.is_sparse for step in before)
            middle = target.replace(last.axes, P)
            assert tuple(before) == steps_of(made, gradient, source, middle, "gradients")


def test_a_sparse_sum_sends_entries_of_eight_bytes() -> None:
    step = Step((0, 1), P, B, SparseRule(0.01).codec)
    kind, nbytes = step.sends(8, 4 * 100_000, 4)
    assert (kind, nbytes) == (SPARSE, 8 * 1000)
    assert sent_bytes(kind, 8, nbytes) == 2 * 7 / 8 * 8000, "4 k (P-1)/P words of 4 bytes"
    made = pricing()
    price = collective(made.cluster, kind, made.group((0, 1)), float(nbytes))
    entries_, count, bounds, ties, counts = (collective(made.cluster, "exchange", made.group((0, 1)), n).seconds
                                             for n in (8000.0, 32.0, 7 * 32.0, 2 * 32.0, 256 * 32.0))
    assert price.seconds == pytest.approx(2 * entries_ + 3 * count + (bounds + ties + 4 * counts) / RENEWED)
    assert step.text(MESH) == "net+node: P->B as top 0.01" and Step.parse(step.text(MESH), MESH) == step


@pytest.mark.parametrize("text", ["0.01", "1.0", "0.05,warmup=100", "0.01,momentum=0.9", "1e-05,warmup=3,momentum=0.5"])
def test_the_text_of_a_rule_is_read_back(text: str) -> None:
    rule = SparseRule.parse(text)
    assert str(rule) == text and SparseRule.of(rule.codec) == rule and rule.copies == 1 + ("momentum" in text)


@pytest.mark.parametrize("text", ["net: P->B as top 0", "net: P->B as top 1.5", "net: P->B as top x",
                                  "net: P->S(0) as top 0.1", "net: P->B as top nan",
                                  "net: P->B as top 0.1,warmup=-1", "net: P->B as top 0.1,momentum=1",
                                  "net: P->B as top 0.1,warmup", "net: P->B as top 0.1,warmup=1,warmup=2",
                                  "net: P->B as top 0.1,heat=3"])
def test_a_step_that_no_sparse_sum_can_be_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"sparse|cannot be sent|warm-up of|momentum of"):
        Step.parse(text, MESH)


def test_a_gradient_has_at_least_a_few_entries_and_no_more_than_it_has() -> None:
    assert entries(0.01, 100_000, 4) == 1000 and entries(0.01, 100, 4) == 16 and entries(0.5, 3, 4) == 3
    assert entries(SparseRule.of(SparseRule(1e-05).codec).share, 10_000_000, 2) == 100
    assert str(Layout((P, B)).replace((0,), B)) == "B B"
