"""Patches of other packages' internals: each file `*_patch.py` names what it replaces, and this notices a change.

Such a file has `MADE_FOR`, the package with its version, and `PATCHED`: each replaced function, written as
`module:Class.name`, with the names of its parameters.
"""

import importlib
import importlib.metadata
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "autoddl").rglob("*_patch.py"))


def module_of(file: str) -> ModuleType:
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def parameters_of(function: Any) -> str:
    """`self, *args`: the parameters of a function by name."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(stars.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values())


def check_patched(file: str, path: str, parameters: str) -> None:
    """Fails where `path` is gone or takes other parameters than those that the patch was written for."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{file} patches {path}, which is gone ({error}): find what does its work now, or drop the patch")
    if parameters_of(found) != parameters:
        pytest.fail(f"{file} patches {path}({parameters}), which is now {path}({parameters_of(found)}): read it again "
                    "and adapt the patch")


def test_there_are_patches() -> None:
    assert {Path(file).name for file in FILES} >= {"torch_export_patch.py", "transformers_masks_patch.py",
                                                   "transformers_experts_patch.py", "autograd_function_patch.py"}


@pytest.mark.parametrize("file", FILES)
def test_what_is_patched_is_still_there(file: str) -> None:
    for path, parameters in module_of(file).PATCHED.items():
        check_patched(file, path, parameters)


@pytest.mark.parametrize("file", FILES)
def test_a_patch_was_written_for_the_installed_version(file: str) -> None:
    package, version = module_of(file).MADE_FOR.split()
    installed = importlib.metadata.version(package)
    assert installed.startswith(f"{version}."), \
        f"{file} was written for {package} {version} and finds {installed}: read what it patches again, then MADE_FOR"


@pytest.mark.parametrize(("path", "says"), [
    ("torch.fx:GraphModule.recompiled", "recompiled, which is gone"), ("torch.nowhere:f", "which is gone"),
    ("torch.fx:GraphModule.to_folder", r"is now .*to_folder\(self, folder, module_name\)")])
def test_a_change_is_noticed(path: str, says: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=says):
        check_patched("a_patch.py", path, "self")
