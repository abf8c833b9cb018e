"""What README, CONTRIBUTING, RESULTS and docs name exists: files, make targets, verbs."""

import re
from pathlib import Path

import pytest

from autoddl.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/benchmarks/RESULTS.md")] + [
    *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples/benchmarks/results").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_target_verb_and_script_exists(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"`make ([a-z-]+)", text)} <= targets
    verbs = set(re.findall(r"(?:`|^)(?:sudo )?(?:\.venv/bin/)?autoddl ([a-z][a-z-]+)", text, re.MULTILINE))
    assert verbs <= VERBS.keys(), verbs - VERBS.keys()
    for script in re.findall(r"\b((?:examples|tests)/[\w/]+\.py)\b", text):
        assert (ROOT / script).exists(), script


def test_the_pages_keep_to_their_size() -> None:
    assert len((ROOT / "examples/benchmarks/RESULTS.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 45
