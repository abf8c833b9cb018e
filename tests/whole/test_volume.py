"""Words of a few linears: the formulas are those of known schemes, and a plan sends no more than the best grids."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent.parent / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("volume", FOLDER / "volume.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))


def test_known_schemes_are_grids(bench: ModuleType) -> None:
    m, n, k, p = 4096, 1024, 512, 16
    assert bench.words((m, n, k), (p, 1, 1)) == 2 * (1 - 1 / p) * k * n
    assert bench.words((m, n, k), (1, p, 1)) == 2 * (1 - 1 / p) * m * k
    assert bench.words((m, n, k), (1, 1, p)) == 2 * (1 - 1 / p) * m * n
    for size in ((m, n, k), (512, 512, 512), (25088, 4096, 256)):
        for ranks in (8, 64, 512):
            assert bench.bound(size, ranks) <= min(bench.words(size, g) for g in bench.grids(ranks)) * (1 + 1e-9)


def figures(row: tuple[str, ...]) -> list[float]:
    return [float(text) for text in row[2:]]


def test_the_plan_of_vggs_classifier_sends_what_its_best_grids_send(bench: ModuleType) -> None:
    data, tensor, grid, plan, alone, between, least = figures(bench.row("VGG", bench.classifier(256), 8)[0])
    assert (data, tensor, grid) == (216.36, 4.12, 4.12)
    assert (plan, alone, between, least) == (3.33, 3.33, 0.0, 3.17)


def test_a_layers_plan_sends_no_more_than_grids_and_what_joins_them(bench: ModuleType) -> None:
    row, lists = bench.row("layer", bench.transformer(1024, 1 << 14), 16)
    data, tensor, grid, plan, alone, between, least = figures(row)
    assert (data, tensor, grid, alone, least) == (23.59, 125.83, 19.4, 18.35, 18.27)
    assert between == 1.05 and plan <= round(alone + between, 2) and "S(1)->S(0)" in lists[-1]
