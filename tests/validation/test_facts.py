"""Facts known by name are data: each has its source, what it points to exists, and code knows no names."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from published import run

from autoddl.core.errors import InputError
from autoddl.cost_models import load_device
from autoddl.cost_models.links import LINKS_FILE
from autoddl.cost_models.software import SLOWER, SOFTWARE_FILE
from autoddl.validation.clusters import LINK_WORDS, LINKS, SYSTEMS, build_cluster, system_of
from autoddl.validation.facts import FOLDER, find_beginning
from autoddl.validation.runs_file import MODELS
from autoddl.validation.software import (
    PROGRAMS,
    RECIPES,
    Recipe,
    recomputation_of,
    visible_share,
)

KNOWN_LINKS = frozenset(yaml.safe_load(LINKS_FILE.read_text(encoding="utf-8")))
NAMES = frozenset(("file", "program", "model", "device"))
"""Fields that say whose the facts are; cost_models/hardware/ has the sources of a device's file."""
SECTIONS = {FOLDER / "software.yaml": ("programs", "recipes"), FOLDER / "models.yaml": ("",),
            FOLDER / "systems.yaml": ("devices", "links"), SOFTWARE_FILE: ("profiles", "attention", "devices")}

SPECIAL_WORDS = {
    "as_plan": {"zb"},  # the beginning of a schedule's name
    "clusters": {"fully-connected", "most", "switch"},  # a topology; a key of a link's facts; a row names a switch
    "facts": {"sources"},
    "layers": {"gelu"},
    "run_as_plan": {"bfloat16", "float16"},
    "run_parts": {"MLA", "ReLU", "1f1b", "interleaved", "products"},  # words of workload and schedule
    "runs_file": {"0123", "inf", "interleaved", "iter_time_s", "max", "mixed", "none", "tflops_per_gpu", "tokens_per_s",
                  "tokens_per_s_per_gpu"},  # names of columns, and how they are written
    "software": {"-compiled", "core", "float8", "later", "op", "products", "recipe", "selective"},  # words of notes,
    # recompute and framework; the beginning of a dtype's name; a key of a program's facts
}
"""Module -> strings that it compares with: words of a row's columns and of our own values. Whoever adds one decides
here that it is no name of a program, model or device, and belongs to no YAML file."""


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for file, sections in SECTIONS.items():
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        for section in sections:
            for name, row in (tree[section] if section else tree).items():
                yield f"{file.stem} {section} {name}", row


@pytest.mark.parametrize(("place", "row"), list(rows()))
def test_every_fact_has_a_source(place: str, row: dict[str, Any]) -> None:
    assert set(row) - {"sources"} - NAMES <= set(row["sources"]) <= set(row), place
    assert all(len(source) > 10 for source in row["sources"].values()), place


def test_facts_point_to_what_exists() -> None:
    for system in SYSTEMS.values():
        assert load_device(system.file).name and system.link in {*KNOWN_LINKS, *LINKS}
    assert all(word.link in KNOWN_LINKS for word in LINK_WORDS.values())
    assert all(program.attention in {"best", "products", *SLOWER} for program in PROGRAMS.values())
    assert all(find_beginning(recipe.program, PROGRAMS) and system_of(recipe.device) for recipe in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_of_its_program_model_and_device_alone(recipe: Recipe, tmp_path: Path) -> None:
    """A run that begins with its names follows it; with one name changed, and no recipe for that, none is known."""
    told = {"framework": f"{recipe.program} 1.0", "model": f"{recipe.model} of a kind", "gpu_type": recipe.device,
            "intra_link": "NVLink4", "recompute": "recipe default"}
    assert recipe.recompute in ("none", "full", "core", "operators", "modules")
    assert recomputation_of(run(tmp_path, **told)) == recipe.recompute
    for other in ({"framework": "MaxText"}, {"model": f"No {recipe.model}"}, {"gpu_type": "A100"}):
        assert recomputation_of(run(tmp_path, **told | other)) == "", other


def test_the_longest_beginning_wins_whatever_the_case() -> None:
    assert find_beginning("megatron-deepspeed of a kind", PROGRAMS) == "Megatron-DeepSpeed"
    assert find_beginning("abacus", PROGRAMS) == ""


def test_a_device_is_known_by_its_whole_name_or_an_alias_of_it() -> None:
    assert system_of("h100-sxm5-80gb ") == system_of("H100") == system_of("H100-80GB")
    assert system_of("A100-80GB").file == "A100-80GB" and system_of("H100-96GB-HBM2e-500W").file == "H100-96GB"
    assert system_of("NVIDIA H100 80GB HBM3") == system_of("H100") and system_of("NVIDIA B200") == system_of("B200")
    assert system_of("Tesla V100-SXM2-16GB").file == "V100-16GB" and system_of("NVIDIA H200").file == "H200-141GB"
    assert system_of("NVIDIA GeForce RTX 4090").file == "RTX-4090-24GB"
    for name, file in (("TPU-v5p", "TPU-v5p-95GB"), ("TPU v6e", "TPU-v6e-32GB"), ("Trainium2", "Trainium2-96GB")):
        with pytest.raises(InputError, match=f"'{name}' is the device {file}, .* cluster file with device: {file}"):
            system_of(name)
    for unknown in ("H1000", "A100X", "GB2000"):
        with pytest.raises(InputError, match=f"'{unknown}' is none of .*did you mean '.*{unknown[:3]}"):
            system_of(unknown)


@pytest.mark.parametrize(("device", "words", "rate"), [
    ("H800", "NVLink4-8links", 200e9), ("H800", "NVLink4 (18 links)", 450e9), ("H100", "PCIe6", 121e9),
    ("Gaudi3", "Gaudi3", 525e9), ("MI350X", "Infinity Fabric", 537.6e9), ("L40S", "pcie5", 63e9)])
def test_a_link_of_a_node_is_any_of_the_links_file(device: str, words: str, rate: float) -> None:
    assert build_cluster(device, 8, 8, words, 0.0).levels[0].bandwidth == rate


@pytest.mark.parametrize(("device", "words", "said"), [
    ("H100", "NeuronLink3", "'NeuronLink3' is of Trainium2, and gpu_type is H100-80GB: leave it empty for NVLink4"),
    ("RTX-4090", "NVLink4", "'NVLink4' is of H100, H200, .* leave it empty for PCIe4"),
    ("H100", "NVLink 4", "'NVLink 4' is none of .*did you mean 'NVLink4'"),
    ("H100", "string", "any other is written in a cluster file")])
def test_another_link_of_a_node_is_one_line(device: str, words: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        build_cluster(device, 8, 8, words, 0.0)


def test_a_node_that_is_not_stated_is_that_of_the_devices_system(tmp_path: Path) -> None:
    told = {"intra_link": "", "microbatch": 1, "tp": 1}
    nodes = [run(tmp_path, **told | {"gpu_type": device, "n_gpus": n, "dp": n, "global_batch": n}).gpus_per_node
             for device, n in (("GB200", 8), ("GB300", 72), ("NVIDIA GB200", 144), ("GB200", 256), ("B200", 256))]
    assert nodes == [8, 72, 72, 64, 8]
    assert run(tmp_path, **told | {"gpu_type": "GB200", "gpus_per_node": 4, "dp": 8}).gpus_per_node == 4


def test_a_column_of_the_row_overrides_what_is_known_by_name(tmp_path: Path) -> None:
    known = {"model": "GPT-OSS 20B", "framework": "Megatron-Bridge", "moe_experts": 8, "moe_topk": 2, "ep": 2,
             "recompute": "recipe default", "gpu_type": "H100-SXM5-80GB", "intra_link": "NVLink4"}
    plain = run(tmp_path, **known)
    told = run(tmp_path, **known | {"head_dim": 96, "window": 0, "recompute": "modules", "expert_bias": 0,
                                    "clamped": 0, "yarn": 0, "qk_norm": 1})
    assert (plain.head_dim, plain.window, plain.expert_bias, plain.clamped, plain.yarn) == (64, 128, True, True, True)
    assert (told.head_dim, told.window, told.expert_bias, told.clamped, told.yarn) == (96, 0, False, False, False)
    assert told.qk_norm and not plain.qk_norm
    assert visible_share(plain) < visible_share(told) == 1
    assert [recomputation_of(one) for one in (plain, told)] == ["", "modules"]


def compared(tree: ast.Module) -> set[str]:
    """Strings that code compares with, looks for at an end of a text, or matches."""
    places: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            places.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (
                "startswith", "endswith", "removeprefix", "removesuffix"):
            places += node.args
    return {one.value for place in places for one in ast.walk(place)
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value}


def test_a_special_case_in_code_is_a_decision() -> None:
    """Operators of the graph have names of their own; all other strings that code compares with are listed above."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = {word for word in compared(tree) if not word.startswith(("aten.", "autoddl."))}
        if words:
            found[path.stem] = words
    assert found == SPECIAL_WORDS


def test_code_names_no_program_model_or_device() -> None:
    names = [*PROGRAMS, *MODELS, *SYSTEMS, *LINKS, *LINK_WORDS]
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                assert not [name for name in names if name.lower() in node.value.lower()], (path.stem, node.value)
