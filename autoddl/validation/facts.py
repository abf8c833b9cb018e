"""Reads what is known of named programs, models and systems from the YAML files beside this module.

    software.yaml   training programs, their recipes, generations of fused attention
    models.yaml     models whose layers differ from what a row's columns describe
    systems.yaml    devices with their reference systems, links inside a node, words for links
    workloads.yaml  families of models, by the words that name them

A row of such a file is a name, its facts, and under `sources` where each fact comes from. A published run names a
program or model in words of its own, so these are known by their beginning. A device is known by its whole name, or by
one of its aliases: an H1000 is no H100. Case does not matter.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FOLDER", "find_beginning", "read_aliases", "read_facts", "read_words"]

FOLDER = Path(__file__).parent


@lru_cache(maxsize=8)
def _read(file: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    return tree


def read_facts(file: str, section: str = "") -> dict[str, dict[str, Any]]:
    """Reads the rows of a YAML file, or of one section of it: name -> field -> value, without the sources."""
    rows = _read(file)[section] if section else _read(file)
    return {name: {field: value for field, value in row.items() if field != "sources"} for name, row in rows.items()}


def read_aliases(file: str) -> dict[str, str]:
    """Reads the section `aliases` of a YAML file: other name -> name of a row."""
    return dict(_read(file)["aliases"])


def read_words(file: str, section: str) -> re.Pattern[str]:
    """Reads a section of a YAML file that lists words: what finds one of them in a text, whatever the case."""
    return re.compile(rf"\b({'|'.join(_read(file)[section])})\b", re.IGNORECASE)


def find_beginning(text: str, names: Iterable[str]) -> str:
    """Returns the longest of `names` with which `text` begins, whatever the case; "" where there is none."""
    return max((name for name in names if text.lower().startswith(name.lower())), key=len, default="")
