"""Tells what the training program of a published run does, from the words of its row and `software.yaml`.

    program     which kernels are fused, which attention, what is sent while it computes, what `selective` recomputes
    recipe      what is recomputed where a row only says that it follows the program's recipe

A program is known by the beginning of its name, the longest that is listed. Any other is taken to be modern, which is
what the defaults of `Software` say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoddl.pricing.price import HOST, UPDATE
from autoddl.validation.clusters import system_of
from autoddl.validation.facts import find_beginning, read_facts
from autoddl.validation.runs import Run

__all__ = ["PROGRAMS", "RECIPES", "Recipe", "Software", "attention_slowdown", "recomputation_of",
           "runs_expert_biases", "software_of"]


@dataclass(frozen=True, slots=True)
class Software:
    """The behaviour of a training program beyond the operators of a model."""

    fuses: bool = True
    """Whether chains of elementwise operators are one kernel."""
    attention: str = "best"
    """Attention by two `products`, by a generation of fused attention (`flash-1`), or by the `best` of the device."""
    dropout: bool = False
    """Whether it trains with dropout."""
    overlaps: frozenset[str] = frozenset(("dp", "cp"))
    """Degrees of parallelism, of tp, dp, cp and ep, whose messages are sent beside computation."""
    gradient: int = 4
    """Bytes of a gradient on the wire."""
    update: int = UPDATE
    """Bytes that clipping and the optimizer move per parameter."""
    host: float = HOST
    """Seconds of the host per operator of the graph and pass, with its part of autograd and of Python. A faster device
    waits for it. Assumed: of the order that runs of small microbatches show."""
    selective: str = "core"
    """What selective recomputation repeats: the `core` of attention, or every other product (`operators`)."""
    unpads: bool = False
    """Whether queries, keys and values are copied into one row without padding around fused attention, and back."""
    unpacked: float = 0.0
    """Bytes per parameter that ZeRO-3 moves on a device per gather of a layer, besides what links carry."""
    packed: float = 0.0
    """Bytes per parameter that ZeRO-3 moves on a device per reduction of a layer, besides what links carry."""
    separate_expert_biases: bool = False
    """Whether biases of experts and clamps of their gates are kernels of their own (`expert_biases`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recomputation in a program's recipe for a model on a device; all are matched by the beginnings of names."""

    program: str
    model: str
    device: str
    recompute: str


def _software(overlaps: Iterable[str] | None = None, **row: Any) -> Software:
    found = Software(**row)
    return found if overlaps is None else replace(found, overlaps=frozenset(overlaps))


PROGRAMS: Mapping[str, Software] = {name: _software(**row)
                                    for name, row in read_facts("software.yaml", "programs").items()}
"""Beginning of a program's name -> what it does."""

RECIPES = tuple(Recipe(**row) for row in read_facts("software.yaml", "recipes").values())

SLOWER: Mapping[str, float] = {name: row["slower"] for name, row in read_facts("software.yaml", "attention").items()}
"""Generation of fused attention, oldest first -> how many times longer it takes than the next."""

BLOCK = 128
"""Queries and keys of a block of fused attention, as the cost model's kernels have it."""


def software_of(run: Run) -> Software:
    """Returns what is known of the program of a run; a row whose notes say so was compiled."""
    found = PROGRAMS.get(find_beginning(run.framework, PROGRAMS), Software())
    return replace(found, fuses=True) if "compile" in run.notes else found


def attention_slowdown(run: Run, software: Software) -> float:
    """Returns how many times longer fused attention takes than by the best kernels of the device and with all keys."""
    return _visible_share(run) * _generations_behind(software.attention, system_of(run.device).attention)


def _visible_share(run: Run) -> float:
    """The share of causal attention's keys that queries see, on the mean of layers, in whole blocks."""
    return (1 + min(1.0, 2 * (run.window + BLOCK) / (run.seq + BLOCK))) / 2 if run.window else 1.0


def _generations_behind(used: str, best: str) -> float:
    """How many times longer one generation of fused attention takes than another, the device's best."""
    factor, generations = 1.0, list(SLOWER)
    if used in SLOWER:
        for name in generations[generations.index(used):generations.index(best)]:
            factor *= SLOWER[name]
    return factor


def runs_expert_biases(run: Run, software: Software) -> bool:
    """Whether experts have biases and clamped gates that the program computes by kernels of their own."""
    return software.separate_expert_biases and run.experts > 0 and run.expert_biases


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
