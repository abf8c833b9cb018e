"""Tells what the training program of a published run does, from the words of its row and `software.yaml`.

    program     which kernels are fused, which attention, what is sent while it computes, what `selective` recomputes;
                a row may say by itself what is sent so, and that CUDA graphs replay the whole step
    recipe      what is recomputed where a row only says that it follows the program's recipe

A program is known by the beginning of its name, the longest that is listed, or by the name of a software profile. Of
`one / another` either tells. Any other is taken to run eager, as PyTorch does by default. A name may tell a generation
of fused attention besides, like `Megatron-DeepSpeed (FlashAttention-2)`, or `eager attention`. It or a row's notes may
tell that the program was compiled, but not by words like `not compiled` or `whether compiled is not stated`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoddl.core.names import near_names
from autoddl.cost_models.software import SOFTWARE, Software
from autoddl.validation.clusters import cluster_of
from autoddl.validation.facts import find_beginning, read_facts
from autoddl.validation.run_parts import narrow_dtype
from autoddl.validation.runs import Run

__all__ = ["PROGRAMS", "RECIPES", "Recipe", "profile_of", "recomputation_of", "software_of", "splits_stream",
           "unknown_programs", "visible_share"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recomputation in a program's recipe for a model on a device; all are matched by the beginnings of names."""

    program: str
    model: str
    device: str
    recompute: str


_PROGRAMS: Mapping[str, str] = {name: row["profile"] for name, row in read_facts("software.yaml", "programs").items()}
"""Beginning of a program's name -> the software profile that says what it does."""

PROGRAMS: Mapping[str, Software] = {name: SOFTWARE[profile] for name, profile in _PROGRAMS.items()}
"""Beginning of a program's name -> what it does."""

_PROFILES: Mapping[str, str] = {**_PROGRAMS, **{name: name for name in SOFTWARE
                                                if name not in {program.lower() for program in _PROGRAMS}}}
"""The same of programs and of software profiles, which are known by the beginnings of their names too."""

LATER: Mapping[str, str] = {name: row["later"] for name, row in read_facts("software.yaml", "programs").items()
                            if "later" in row}
"""The same, of releases for devices that multiply float8."""

APART = frozenset(name for name, row in read_facts("software.yaml", "programs").items() if row.get("yarn_apart"))
"""Beginnings of the programs that turn queries and keys by rows of operators where YaRN scales positions."""

FORCED = frozenset(name for name, row in read_facts("software.yaml", "programs").items() if row.get("fsdp_overlaps"))
"""Beginnings of the programs whose sharded gradients and weights are always sent beside computation."""

RECIPES = tuple(Recipe(**row) for row in read_facts("software.yaml", "recipes").values())

UNKNOWN = "eager"
"""Profile of a program that is not known."""

_ATTENTION = re.compile(r"FlashAttention-([123])\b|\beager attention\b", re.IGNORECASE)
"""A generation of fused attention in the name of a program, or that it has two products."""

_COMPILED = re.compile(r"(?<![\w.])(?<!not )(?<!no )(?<!without )(?<!whether )(?:torch\.)?compiled?\b", re.IGNORECASE)
"""Words which say that a program was compiled."""

BLOCK = 128
"""Queries and keys of a block of fused attention, as the cost model's kernels have it."""


def software_of(run: Run) -> Software:
    """Returns what is known of the program of a run; a row that says so was compiled."""
    listed, profile = _listed(run.framework), profile_of(run)
    found = PROGRAMS[listed] if profile == _PROGRAMS.get(listed) else SOFTWARE[profile]
    if _is_compiled(run):
        found = _compiled(found)
    if said := _ATTENTION.search(run.framework):
        found = replace(found, attention=f"flash-{said[1]}" if said[1] else "products")
    more = frozenset({"dp"}) if listed in FORCED and run.zero_stage > 1 else frozenset()
    return replace(found, narrow=narrow_dtype(run) or found.narrow, dropout=found.dropout and not run.gated,
                   overlaps=found.overlaps | more if run.overlap is None else run.overlap,
                   host=0.0 if run.graphs else found.host,
                   rotates_apart=found.rotates_apart or (run.yarn and listed in APART))


def profile_of(run: Run) -> str:
    """Returns the name of the software profile of a run's program, as it runs compiled where it does and has one."""
    listed = _listed(run.framework)
    name = LATER[listed] if listed in LATER and _multiplies_float8(run) else _PROFILES.get(listed, UNKNOWN)
    return f"{name}-compiled" if _is_compiled(run) and f"{name}-compiled" in SOFTWARE else name


def splits_stream(run: Run) -> bool:
    """Whether the stream between layers is split along the sequence over tp.

    Where a row does not say so, it is by programs with fused attention, which is younger (Korthikanti et al. 2022).
    """
    said = run.sequence_parallel
    return run.tp > 1 and (software_of(run).attention != "products" if said is None else said)


def _is_compiled(run: Run) -> bool:
    """Whether the name of a program or the notes of a run say that it was compiled."""
    return any(_COMPILED.search(said) for said in (run.framework, run.notes))


def _compiled(program: Software) -> Software:
    """What a program does once it is compiled: rows of elementwise operators are a kernel each, both ways."""
    return replace(program, fuses=True, by_hand=True, norms_in_rows=False, masks_apart=False, rotates_apart=False,
                   biases_apart=False)


def _listed(framework: str) -> str:
    """The listed beginning of a program's name, or of a part of it behind a slash; "" where there is none."""
    return next((found for part in (framework, *framework.split("/")[1:])
                 if (found := find_beginning(part.strip(), _PROFILES))), "")


def _multiplies_float8(run: Run) -> bool:
    """Whether the device of a run lists a rate of products in float8."""
    return any(dtype.startswith("float8") for dtype, _ in cluster_of(run).device.peaks)


def unknown_programs(runs: Iterable[Run]) -> tuple[str, ...]:
    """A line for every framework of the runs that is not known, with the rows that have it and what is near it."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        if not _listed(run.framework):
            rows.setdefault(run.framework, []).append(run.row)
    known = (*_PROGRAMS, *(name for name in SOFTWARE if name not in _PROGRAMS))
    others = [name for name in known if not any(sign in name for sign in "(0123456789")]
    found = []
    for name, where in rows.items():
        said = f"the framework {name!r} is not known" if name else "no framework is named"
        place = f"row{'s' * (len(where) > 1)} {', '.join(where[:4])}{' ...' * (len(where) > 4)}"
        found.append(f"{place}: {said}, so that the program is taken to run eager; "
                     + near_names(name, known, f"known are {', '.join(others)}, and some by their release"))
    return tuple(found)


def visible_share(run: Run) -> float:
    """The share of causal attention's keys that queries see, on the mean of layers, in whole blocks."""
    return (1 + min(1.0, 2 * (run.window + BLOCK) / (run.seq + BLOCK))) / 2 if run.window else 1.0


def recomputation_of(run: Run) -> str:
    """Returns what a run computes again for backward, or "" where its row does not tell.

    none        nothing
    full        whole layers
    core        the core of attention
    operators   every other product and all that is bound by memory
    modules     the second norm and the activation of the experts
    """
    words = run.recompute
    if words.startswith("recipe"):
        return _by_recipe(run)
    if not words.startswith("selective"):
        return next((kind for kind in ("none", "full", "modules") if words.startswith(kind)), "")
    if "core" in words or "op" in words:
        return "core" if "core" in words else "operators"
    return software_of(run).selective


def _by_recipe(run: Run) -> str:
    """The recomputation of the run's recipe; empty where no recipe was looked up."""
    for recipe in RECIPES:
        names = ((run.framework, recipe.program), (run.model, recipe.model), (run.device, recipe.device))
        if all(find_beginning(text, (name,)) for text, name in names):
            return recipe.recompute
    return ""
