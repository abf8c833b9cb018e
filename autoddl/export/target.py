"""Says what a target can express, and writes and reads its text.

A target is its name, its limits and two functions. Its text says a configuration, and no model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.export.configuration import Configuration

__all__ = ["UNREAD", "Model", "Target", "TargetLimits", "TensorPiece", "check_keys", "section", "whole_number"]

UNREAD = "leave it out if it says nothing of parallelism, batch, precision or recomputation"
"""What to do with a setting that is not read here."""


class TensorPiece(NamedTuple):
    """A parameter of which each rank of tensor parallelism has a part along `dim`; `kind` is the op that reads it."""

    fqn: str
    dim: int
    kind: str


class Model(Protocol):
    """The facts that a target's text says of the model (`subject.Subject`)."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def units(self) -> tuple[str, ...]:
        """Its units in the order in which they run."""

    @property
    def blocks(self) -> Sequence[object]:
        """Its blocks."""

    @property
    def tokens(self) -> int:
        """Tokens of a row."""

    @property
    def pieces(self) -> Sequence[TensorPiece]:
        """The parameters that tensor parallelism splits."""

    @property
    def norms(self) -> Sequence[str]:
        """The modules beside products that read parameters of one dim."""

    @property
    def ties(self) -> Sequence[tuple[str, str]]:
        """Pairs of names of one parameter."""

    @property
    def factory(self) -> Mapping[str, Any]:
        """The file, name and arguments of the function that makes it; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """The configurations that a target can express.

        data          roles that ranks which split the batch may have, outermost first; () is none
        beside        those that they may have beside tensor or context parallelism; None for the same ones
        context       whether it has context parallelism
        experts       whether it has expert parallelism
        stages        whether it has pipelines
        schedules     kinds of schedules: `1f1b`, `interleaved` ...
        layers        whether stages may have different numbers of blocks
        recompute     kinds of policies: `none`, `full`, `selective`, `first`, `every`
        precisions    recipes of precision
        sequence      whether the sequence is split over ranks of `tensor`: always, never, or as it is said
    """

    data: frozenset[tuple[str, ...]]
    beside: frozenset[tuple[str, ...]] | None = None
    context: bool = False
    experts: bool = False
    stages: bool = True
    schedules: tuple[str, ...] = ("1f1b",)
    layers: bool = True
    recompute: tuple[str, ...] = ("none", "full", "selective")
    precisions: tuple[str, ...] = ("float32", "bf16-mixed")
    sequence: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, slots=True)
class Target:
    """A trainer whose configuration is written and read.

        name       as the shell has it
        title      as its authors write it
        limits     what it can express
        write      configuration and model -> text
        read       text and number of ranks -> configuration; None for a target that is only written. The number is
                   None where it is not known. Raises InputError for a text that is none, and where it does not say the
                   number of ranks
        notes      what is different there though it has the same name, by feature
        keeps      whether its selective recomputation may keep all but the core of attention, and so much more
    """

    name: str
    title: str
    limits: TargetLimits
    write: Callable[[Configuration, Model], str]
    read: Callable[[str, int | None], Configuration] | None = None
    notes: Callable[[Configuration], Sequence[str]] = lambda _: ()
    keeps: bool = False


def check_keys(found: Mapping[str, object], known: Iterable[str], where: str) -> None:
    """Raises InputError for a key that is not known, named with the nearest that is."""
    every = tuple(known)
    for key in found:
        if key not in every:
            near = near_names(key, every, UNREAD, most=1)
            raise InputError(f"{where} has no {key!r} that is known here; {near}")


def section(found: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The section of a name, empty where it is left out. Raises InputError where it is none."""
    inner = found.get(name, {})
    if not isinstance(inner, Mapping):
        raise InputError(f"{where} {name!r} is {inner!r}; it is a section with settings")
    return inner


def whole_number(name: str, value: object, least: int = 1) -> int:
    """The number that a setting has, as text or number. Raises InputError for another value."""
    text = str(value)
    if isinstance(value, bool) or not text.lstrip("-").isdigit() or int(text) < least:
        raise InputError(f"{name} is {value!r}; it is a whole number, at least {least}")
    return int(text)
