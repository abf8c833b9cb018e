"""Loads factories: `FILE.py:name` is a function that returns a module, or a module and a sample.

    autoddl plan examples/gpt.py:gpt cluster.yaml --set layers=4      ->  gpt(layers=4)

Only a file that the user names is run; one named inside a plan never is.
"""

import ast
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoddl.capture.gc_pause import pause_gc
from autoddl.core.errors import AutoDDLError, InputError
from autoddl.core.names import near_files
from autoddl.core.processes import Terminated, free_bytes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Factory", "settings"]

_KINDS: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
"""Kinds of parameters to which settings are held."""
WORD = re.compile(r"[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class Factory:
    """A function of a file, and the keywords to call it with."""

    file: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, arguments: Mapping[str, Any] | None = None) -> "Factory":
        """The factory that `FILE.py:NAME` names. Raises InputError for another text."""
        file, colon, name = text.rpartition(":")
        if not colon or not file.endswith(".py") or not name:
            raise InputError(f"{text!r} is no factory; {_factory_hint(text)}")
        return cls(file, name, dict(arguments or {}))

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    def to_json(self) -> dict[str, Any]:
        """The file, the name and the arguments, as a plan keeps them."""
        return {"file": self.file, "name": self.name, "arguments": dict(self.arguments)}

    def with_defaults(self, kept: Mapping[str, Any]) -> "Factory":
        """The factory with the arguments that a plan `kept` of it, where none are set anew."""
        defaults = kept.get("arguments", {}) if kept.get("name") == self.name else {}
        return Factory(self.file, self.name, {**defaults, **self.arguments})

    def function(self) -> Callable[..., Any]:
        """The function; its file is run once. Raises InputError where the file has no such function."""
        module = _load(Path(self.file))
        found = getattr(module, self.name, None)
        if not callable(found):
            names = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")
                     and value.__module__ == module.__name__]
            near = get_close_matches(self.name, names, n=3, cutoff=0.3) or names
            raise InputError(f"{self.file} has no factory {self.name!r}; " +
                             (f"it has {', '.join(near)}" if near else "it defines no function"))
        return found  # type: ignore[no-any-return]

    def build(self) -> "tuple[nn.Module, Any]":
        """Calls the function: (module, sample or None). Raises InputError where it fails or returns something else."""
        with pause_gc():
            return self._built()

    def shaped(self) -> "tuple[nn.Module, Any, str]":
        """As `build`, with parameters on the meta device, and a line where that cannot be: "" where it can.

        A factory that reads values of its parameters is called again, with memory for them. Raises InputError where
        they need more memory than is free.
        """
        from autoddl.capture.patches.torch_parameters_patch import parameters_on_meta
        with pause_gc():
            with parameters_on_meta() as made:
                try:
                    return *self._built(), ""
                except InputError as error:
                    why = error.__cause__
            if why is None:
                return *self._built(), ""
            line = f"{self} reads values of its parameters ({_line(why, self.file)})"
            if made.nbytes > (free := free_bytes()):
                raise InputError(f"{line}, which take {made.nbytes / 1e9:,.1f} GB or more, and {free / 1e9:,.1f} GB "
                                 "are free here: do not read them while the model is made, or make fewer (--set)")
            return *self._built(), f"{line}, so they were made in memory"

    def _built(self) -> "tuple[nn.Module, Any]":
        from torch import nn

        function = self.function()
        arguments = self._checked_arguments(function)
        try:
            made = function(**arguments)
        except (AutoDDLError, Terminated):
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"{self} failed: {type(error).__name__}: {error} ({_line(error, self.file)})") from error
        module, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module):
            raise InputError(f"{self} returned {type(made).__name__}; a factory returns a module, or a module and a "
                             "sample")
        return module, sample

    def _checked_arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments, each as its parameter has it. Raises InputError for those that the function does not take."""
        signature = inspect.signature(function)
        try:
            signature.bind(**self.arguments)
        except TypeError as error:
            raise InputError(f"{self} does not take these arguments: {error}; "
                             f"it is {self.name}{signature}, set with --set NAME=VALUE") from None
        known = signature.parameters
        return {name: _as_kind(self, known[name], value) if name in known else value
                for name, value in self.arguments.items()}


def _as_kind(factory: Factory, parameter: inspect.Parameter, value: Any) -> Any:
    """A value of the kind that a parameter's annotation, else its default, says: a whole number may be a float.

    Raises InputError for text where a number is wanted, a number where a switch is, and the like.
    """
    said = parameter.annotation
    kind = next((one for one in _KINDS if said in (one, one.__name__)), None)
    if kind is None and said is inspect.Parameter.empty and type(parameter.default) in _KINDS:
        kind = type(parameter.default)
    if kind is None or type(value) is kind or value is None:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is str:
        return str(value)
    raise InputError(f"--set {parameter.name}={value}: {factory} takes {_KINDS[kind]} there, and "
                     f"{value!r} is {_KINDS.get(type(value), f'a {type(value).__name__}')}"
                     + (f"; its default is {parameter.default!r}" if parameter.default is not parameter.empty else
                        f"; write one, like {parameter.name}={kind(1)}"))


def _factory_hint(text: str) -> str:
    """How to name a factory instead of `text`: its own functions, where it is a file of Python."""
    if text.endswith((".yaml", ".yml", ".json")):
        return "the factory, FILE.py:NAME, stands in another place: see --help for the order"
    try:
        found = ast.parse(Path(text).read_text(encoding="utf-8")).body if text.endswith(".py") else []
    except (OSError, SyntaxError, ValueError):
        found = []
    names = [one.name for one in found if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    if names:
        return f"write FILE.py:NAME, like {text}:{names[-1]}"
    return "write FILE.py:NAME, like examples/gpt.py:gpt"


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """The arguments that `key=value` texts set; values are Python literals, and a bare word is a string.

    Raises InputError for a text that sets nothing.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--set {text!r} sets nothing; write NAME=VALUE, like layers=4")
        found[key] = _literal(key, value)
    return found


def _literal(key: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if WORD.fullmatch(text):
            return text
        raise InputError(f"--set {key}={text}: {text!r} is no Python literal; write a number, True, 'text' "
                         "or a list of them") from None


def _load(path: Path) -> ModuleType:
    """The file as a module, run once per process; its folder is importable, as if it had been started."""
    name = "autoddl_factory_" + re.sub(r"\W", "_", str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        way_out = near_files(path, "a factory is FILE.py:NAME, like examples/gpt.py:gpt")
        raise InputError(f"there is no file {str(path)!r}; {way_out}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (AutoDDLError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} does not run: {type(error).__name__}: {error} ({_line(error, str(path))})") from error
    return module


def _line(error: BaseException, file: str) -> str:
    """`file:12`, the innermost line of the user's file."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).name == Path(file).name] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}"
