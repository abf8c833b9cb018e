"""Tries every signature of a rule of the user's own, on pieces in this process against the whole call.

The sample is a function of the user's file. It returns the arguments of one call, as a tuple or a list. Every layout
that the rule allows on 2 and on 3 ranks is tried in float64: outputs and gradients are put together from the pieces.
A dim that no number of ranks can cut, as the sample has it, is named: nothing was tried of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl.capture.factory import Factory
from autoddl.capture.own_rules import named_operator, own_arguments, rule_of
from autoddl.capture.rewrites.own_backward import OwnBackward
from autoddl.core.errors import InputError
from autoddl.core.layout import Mesh
from autoddl.operators.rules.dimension_strings import parse
from autoddl.operators.rules.table import options
from autoddl.operators.trials.cases import Case, recorded
from autoddl.operators.trials.trial import check

__all__ = ["OperatorCheck", "Tried", "verify_operator"]

RANKS = (2, 3)
EXACT = 1e-9
"""Relative error above that of rounding in float64."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A signature of the rule.

        signature     the layouts of inputs and outputs on one axis
        ranks         the numbers of ranks that it was tried on
        difference    what differs from the whole call, empty where nothing does
    """

    signature: str
    ranks: tuple[int, ...]
    difference: str


@dataclass(frozen=True, slots=True)
class OperatorCheck:
    """Says of every signature of a rule what differs, and which dims were too small to be cut."""

    operator: str
    rule: str
    tried: tuple[Tried, ...]
    untried: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no signature differs from the whole call."""
        return not any(one.difference for one in self.tried)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and `passed` by name."""
        return asdict(self) | {"passed": self.passed}


def verify_operator(operator: str, sample: Factory) -> OperatorCheck:
    """Runs the rule of `operator` on the arguments that `sample` returns.

    Raises InputError where there is no such operator or rule, and where the call itself fails.
    """
    args, known = _arguments(operator, sample)
    found = named_operator(operator if "::" in operator else known.get(operator, operator))
    rule = rule_of(found)
    if rule is None:
        raise InputError(f"{operator} has no rule, and {sample.file} registers none: write autoddl.rule({operator!r}, "
                         "'...') there, behind the definition")
    case = _case(found, args, str(sample))
    cut, tried = set[str](), dict[str, Tried]()
    for ranks in RANKS:
        mesh = Mesh.parse(f"rank={ranks}")
        for option in options(case.op, case.graph, mesh):
            (signature,) = option.signatures
            cut.add(signature.split)
            before = tried.get(str(signature), Tried(str(signature), (), ""))
            wrong = before.difference or "; ".join(_short(text) for text in check(case, option, mesh, EXACT))
            tried[str(signature)] = Tried(str(signature), (*before.ranks, ranks), wrong)
    names = [dim.names[0] for dims in parse(rule.text).tensors for dim in dims if dim.names[0] != "."]
    return OperatorCheck(operator, rule.text, tuple(tried.values()),
                         tuple(name for name in dict.fromkeys(names) if name not in cut))


def _arguments(operator: str, sample: Factory) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments that the sample returns, and the names of its file."""
    function = sample.function()
    made = _tried(f"{sample} fails", lambda: function(**sample.arguments))
    args = tuple(made) if isinstance(made, tuple | list) else (made,)
    if not any(isinstance(arg, Tensor) for arg in args):
        raise InputError(f"{sample} returns no tensors: return the arguments of one call of {operator}, as a tuple")
    return args, function.__globals__


def _case(operator: Any, args: tuple[Any, ...], sample: str) -> Case:
    """The call in float64, with what it says of itself."""
    wide = tuple(_wide(arg) for arg in args)
    own = isinstance(operator, type)
    target = OwnBackward(operator, ((), (), 0.0, 1)) if own else operator
    name = target.target if own else str(operator)
    case: Case = _tried(f"{name} fails on the sample in float64", lambda: recorded(target, name, wide))
    said = tuple(own_arguments(target, case.op.slots, case.inputs, case.outputs, sample))
    return case.saying(said)


def _wide(arg: Any) -> Any:
    """The argument in float64; tensors in lists as well."""
    if isinstance(arg, Tensor):
        return arg.detach().to(torch.float64) if arg.is_floating_point() else arg.detach().clone()
    return type(arg)(map(_wide, arg)) if isinstance(arg, tuple | list) else arg


def _tried(what: str, run: Any) -> Any:
    try:
        return run()
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        raise InputError(f"{what}: {type(error).__name__}: {reason}") from error


def _short(text: str) -> str:
    """The difference, without the call and its layouts, which the signature says."""
    for mark in (" fails: ", ": output ", ": gradient "):
        _, found, after = text.partition(mark)
        if found:
            return f"{found.removeprefix(': ').strip()} {after}"
    return text
