"""Refuses arguments of the wrong kind before anything is done with them, such as swapped ones."""

from typing import Any

from autoddl.core.errors import InputError

__all__ = ["Argument", "check_arguments", "said_kind"]

Argument = tuple[str, object, type | tuple[type, ...], str]
"""(name, value, the types that it may have, what it is in words)."""


def check_arguments(call: str, *given: Argument) -> None:
    """Raises InputError at the first argument of another type; `call` is the call as it should be written."""
    for name, value, types, what in given:
        if not isinstance(value, types):
            raise InputError(f"{call}: {name} is {what}, not {said_kind(value)}; give the arguments in this order")


def said_kind(value: Any) -> str:
    """Returns what a value is in words: `a dict`, `an Adam`, `None`; of a text its beginning too."""
    if value is None:
        return "None"
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    article = "an" if name[:1].lower() in "aeio" else "a"
    shown = f" {value[:40]!r}" if isinstance(value, str) else ""
    return f"the class {name}" if isinstance(value, type) else f"{article} {name}{shown}"
