"""Arguments and options that several verbs share.

The options of planning are the fields of `PlanOptions`: `takes_options` gives a verb an option for each of them.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from autoddl.core.errors import InputError
from autoddl.core.names import is_factory
from autoddl.planner.options import PlanOptions
from autoddl.planner.unused_options import check_used

__all__ = ["AsJson", "ClusterPath", "Compiled", "FactoryText", "Messages", "PlanPath", "ProfilePath", "Set",
           "SoftwareName", "StageNumber", "takes_options"]

FactoryText = Annotated[str, typer.Argument(metavar="FILE.py:FACTORY",
                                            help="a function that returns a module, or a module and a sample")]
ClusterPath = Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="the machine")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan, as `plan -o` wrote it")]
StageNumber = Annotated[int | None, typer.Option("--stage", min=0, metavar="N",
                                                help="look at this stage of a plan with stages, from 0")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="argument of the factory")]
Compiled = Annotated[bool, typer.Option("--compiled", help="elementwise chains are one kernel, as of torch.compile")]
Messages = Annotated[bool, typer.Option("--messages", help="what a rank sends: kind, group, level, sizes, bytes")]
SoftwareName = Annotated[str | None, typer.Option("--software", metavar="NAME", help="the program that runs the plan: "
                                                  "eager, compiled, torchtitan, torchtitan-compiled, nemo and others; "
                                                  "a wrong name lists all")]
ProfilePath = Annotated[Path | None, typer.Option("--profile", metavar="FILE", help="the machine's constants, as "
                                                  "`calibrate` wrote them")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]


def takes_options(*without: str, compares: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes of a verb with a parameter `options: PlanOptions` a command with an option for each field, but for those in
    `without`, which keep their defaults.

    An option that is written, and has no effect beside the others, is refused; `compares` as in `check_used`."""
    return partial(_command, tuple(one for one in fields(PlanOptions) if one.name not in without), compares)


def _command(every: tuple["Field[Any]", ...], compares: bool, verb: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(PlanOptions)

    @wraps(verb)
    def command(context: typer.Context, **given: Any) -> None:
        _check_order(context, given)
        chosen = {one.name: _read(one, hints[one.name], given.pop(one.name)) for one in every}
        options = PlanOptions(**chosen)
        check_used(options, [name for name in chosen if _is_written(context, name)], compares)
        verb(**given, options=options)

    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "options"]
    made = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one),
                              annotation=_annotation(one, hints[one.name])) for one in every]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    told = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    command.__signature__ = inspect.Signature([told, *keyword, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (told, *keyword, *made)}
    return command


def _check_order(context: typer.Context, given: dict[str, Any]) -> None:
    """Raises InputError where the cluster file stands before the factory."""
    factory, cluster = str(given.get("factory", "")), str(given.get("cluster", ""))
    if factory.endswith((".yaml", ".yml")) and is_factory(cluster):
        raise InputError(f"{factory} is a cluster file and {cluster} a factory, and the factory comes first: write "
                         f"{context.command_path} {cluster} {factory}")


def _is_written(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, be it with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _annotation(one: "Field[Any]", kind: Any) -> Any:
    """The type and the option of a field on the command line: a tuple of words is an option that may come again."""
    about = one.metadata
    flags = [about.get("flag", f"--{one.name.replace('_', '-')}")]
    optional = get_origin(kind) in (Union, types.UnionType)
    base = next(part for part in get_args(kind) if part is not type(None)) if optional else kind
    plain = str if base is float else base
    written: Any = about.get("written", list[str] if get_origin(base) is tuple else plain)
    shown = {key: about[key] for key in ("metavar", "min") if key in about}
    option = typer.Option(*flags, help=about["help"], **shown)
    return Annotated[written if one.default not in (None, ()) else written | None, option]


def _default(one: "Field[Any]") -> Any:
    """The field's default as it is written in the shell."""
    if "written" in one.metadata and isinstance(one.default, tuple):
        return ",".join(map(str, one.default))
    return None if one.default in (None, ()) else one.default


def _read(one: "Field[Any]", kind: Any, given: Any) -> Any:
    """The field's value, from the text written in the shell."""
    if given is None:
        return one.default
    if kind in (float, float | None) and "written" not in one.metadata:
        return _number(str(given), one.name.replace("_", "-"))
    return _numbers(given, one.name) if one.name in ("microbatches", "stages") else given


def _number(text: str, name: str) -> float:
    """`0.01`, or `1%` for the same."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        way_out = "seconds without their unit, like 60" if name.endswith("-limit") else "one, like 0.01 or 1%"
        raise InputError(f"--{name} {text!r} is no number: write {way_out}") from None


def _numbers(text: str, name: str) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--{name} {text!r}: whole numbers with commas between them, like 1,2,4") from None
