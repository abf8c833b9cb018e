"""Configurations that others have published are read, and written again as they were."""

import json
import re
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from worded import WordedModel

from autoddl.export.exported import TARGETS, import_text
from autoddl.export.nearest import is_expressible

FILE = Path(__file__).parent.parent.parent / "examples" / "benchmarks" / "published_configurations.py"
PUBLISHED: Mapping[str, tuple[str, str, int]] = runpy.run_path(str(FILE))["PUBLISHED"]


def settings(target: str, text: str) -> Any:
    """The settings of a text, whatever their order and spaces."""
    if target == "megatron":
        return sorted(re.findall(r"--[\w-]+(?: [^\s-][^\s]*)?", " ".join(text.replace("\\\n", " ").split())))
    return tomllib.loads(text) if target == "torchtitan" else json.loads(text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_written_as_it_was_read(name: str) -> None:
    target, text, devices = PUBLISHED[name]
    found = import_text(text, target, devices)
    assert found.ranks == devices and is_expressible(found, TARGETS[target])
    again = TARGETS[target].write(found, WordedModel(960))
    assert settings(target, again) == settings(target, text)


def test_there_are_ten_of_them_and_they_differ() -> None:
    every = [import_text(text, target, devices) for target, text, devices in PUBLISHED.values()]
    assert len(set(every)) == len(PUBLISHED) >= 10
