"""Registers rules of the user's own, for operators of torch.library and for torch.autograd.Function.

    autoddl.rule("mylib::fused_mlp", "b s d, d f, f d -> b s d | 0*1*2")
    autoddl.rule(MyFunction, "b s d -> b s d", flops=lambda x: 8 * x[0] * x[1] * x[2], saves=["x"])

A rule stands on the operator or on the class itself, so it is there wherever that is defined. Write it behind the
definition, in the file of the model, which every rank imports. A captured graph has its text (`operators.own_facts`),
and so has every plan.

The text says how dims correspond (`operators.rules.dimension_strings`). The operator runs as it is on the pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoddl.capture.rewrites.own_backward import OwnBackward
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.graph import Tensor, Value
from autoddl.operators.own_facts import FLOPS, RULE, SAVES
from autoddl.operators.rules.dimension_strings import Spec, parse, signatures
from autoddl.operators.rules.table import RULES

__all__ = ["named_operator", "own_arguments", "rule", "rule_of"]

Tensors = Sequence[Tensor]
_MARK = "_autoddl_rule"


@dataclass(frozen=True)
class OwnRule:
    """A rule: its text, the flops of a call by the shapes of its tensors, and the names of what backward keeps."""

    text: str
    flops: Callable[..., float] | None = None
    saves: tuple[str, ...] | None = None


def rule(operator: Any, text: str, *, flops: Callable[..., float] | None = None, saves: Sequence[str] | None = None
         ) -> Any:
    """Says in which layouts an operator may run, and returns the operator.

        operator    `"mylib::fused_mlp"`, an operator of torch.ops, or a class of torch.autograd.Function
        text        how the dims of its tensors correspond: `"b s d, d f, f d -> b s d | 0*1*2"`
        flops       of forward, from the shapes of the input tensors, one tuple each; else bytes alone are priced
        saves       names of the arguments that are kept for backward, and `output` or `output.1`; else what capture
                    sees that a Function keeps, and all inputs of an operator of torch.library

    Raises InputError where there is no such operator, or where the text does not fit its arguments.
    """
    found = named_operator(operator)
    name, spec = _name(found), parse(text)
    if isinstance(found, torch._ops.OpOverload):
        _check_operator(found, spec, text)
    else:
        _check_function(found, spec, text)
    read = {n for dims in spec.inputs for dim in dims for n in dim.names}
    made = [n for dims in spec.outputs for dim in dims for n in dim.names if n not in read | {"."}]
    if made:
        raise InputError(f"the rule {text!r} of {name} has the dim {made[0]!r} in an output and in no input: an "
                         "operator runs as it is on pieces, and nothing would cut this dim; write '.'")
    setattr(found, _MARK, OwnRule(text, flops, None if saves is None else tuple(saves)))
    return operator


def rule_of(operator: Any) -> OwnRule | None:
    """The rule that was registered for an operator of torch.ops, or for a class; None without."""
    found: OwnRule | None = vars(operator).get(_MARK)
    return found


def named_operator(operator: Any) -> Any:
    """The operator of torch.ops that a text names, or the class itself. Raises InputError where there is none."""
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        return operator
    found = getattr(operator, "_opoverload", operator)
    if isinstance(found, str):
        space, colons, name = found.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, space, None), base, None) if colons and name else None
        if packet is None:
            raise InputError(f"there is no operator {found!r}: write 'library::name' of one that torch.library has, "
                             "and the rule behind its definition")
        found = getattr(packet, overload, None) if overload else packet
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = getattr(found, found.overloads()[0])
    if not isinstance(found, torch._ops.OpOverload):
        raise InputError(f"{operator!r} is no operator: name one of torch.library, as 'library::name', or give a class "
                         "of torch.autograd.Function")
    return found


def _name(operator: Any) -> str:
    return operator.name() if isinstance(operator, torch._ops.OpOverload) else str(operator.__name__)


def _check_operator(operator: torch._ops.OpOverload, spec: Spec, text: str) -> None:
    """Raises InputError where the text does not fit the schema, or the operator has a rule of ours."""
    name, schema = operator.name(), operator._schema
    if str(operator) in RULES:
        raise InputError(f"{name} has a rule already, which comes with AutoDDL: register one for an operator that has "
                         "none")
    if schema.is_mutable:
        raise InputError(f"{name} writes into its arguments, which no rule covers: write it so that it returns a new "
                         "tensor")
    kinds = [str(argument.type) for argument in schema.arguments]
    several = "List[Tensor]" in kinds or "List[Optional[Tensor]]" in kinds
    least, most = kinds.count("Tensor"), kinds.count("Tensor") + kinds.count("Optional[Tensor]")
    _check_count(name, text, "inputs", len(spec.inputs), least, None if several else most)
    results = [str(result.type) for result in schema.returns]
    lists = any(kind.startswith("List") for kind in results)
    _check_count(name, text, "outputs", len(spec.outputs), len(results), None if lists else len(results))


def _check_function(function: type[torch.autograd.Function], spec: Spec, text: str) -> None:
    """Raises InputError where the text has more inputs than forward has arguments."""
    names = OwnBackward(function).__signature__.parameters.values()
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in names)
    _check_count(function.__name__, text, "inputs", len(spec.inputs), 1, None if several else len(names))


def _check_count(name: str, text: str, what: str, found: int, least: int, most: int | None) -> None:
    if found < least or (most is not None and found > most):
        wanted = f"{least} or more" if most is None else str(least) if least == most else f"{least} to {most}"
        raise InputError(f"the rule {text!r} has {found} {what}, and {name} has {wanted}: write a group of dims for "
                         "each of its tensors")


def own_arguments(target: Any, slots: Sequence[str], inputs: Tensors, outputs: Tensors, line: str
                  ) -> Iterator[tuple[str, Value]]:
    """Yields what a call says of itself, as arguments of its op (`operators.own_facts`).

    Raises CaptureError where a rule does not fit the tensors of the call."""
    own = isinstance(target, OwnBackward)
    found = rule_of(target.function if own else target) if own or isinstance(target, torch._ops.OpOverload) else None
    if own and (found is None or found.saves is None):
        yield SAVES, target.saves
    if found is None:
        return
    name = _name(target.function if own else target)
    try:
        spec = _fitting(found, inputs, outputs)
        yield RULE, found.text
        if found.saves is not None:
            yield SAVES, _saves(found.saves, slots, outputs)
    except InputError as error:
        raise CaptureError(f"the rule of {name} does not fit its call at {line}: {error}") from None
    if found.flops is not None:
        yield FLOPS, (_flops(found.flops, name, inputs), _places(spec))


def _fitting(found: OwnRule, inputs: Tensors, outputs: Tensors) -> Spec:
    spec = parse(found.text)
    signatures(found.text, tuple(t.shape for t in (*inputs, *outputs)))
    whole = [t for t in (*(inputs[k] for term in spec.products for k in term), *outputs) if not t.is_floating]
    if (spec.products or spec.sums) and whole:
        raise InputError(f"its form adds up pieces of a tensor of {whole[0].dtype}, {list(whole[0].shape)}: only "
                         "floating tensors may be partial sums")
    return spec


def _saves(names: Sequence[str], slots: Sequence[str], outputs: Tensors) -> Value:
    made = {f"output.{k}": k for k in range(len(outputs))} | {"output": 0}
    unknown = [name for name in names if name not in slots and name not in made]
    if unknown:
        raise InputError(f"it says that {unknown[0]!r} is kept; there are {', '.join((*slots, *made))}")
    return (tuple(k for k, slot in enumerate(slots) if slot in names),
            tuple(sorted({made[name] for name in names if name in made})), 0.0, 1)


def _flops(flops: Callable[..., float], name: str, inputs: Tensors) -> float:
    shapes = [t.shape for t in inputs]
    try:
        return float(flops(*shapes))
    except Exception as error:
        raise CaptureError(f"the flops of {name} fail for tensors of {shapes}: {type(error).__name__}: {error}; write "
                           "a function of one shape for each tensor") from error


def _places(spec: Spec) -> Value:
    """For every name that a dim may be split by, the first (tensor, dim) that has it."""
    found: dict[str, tuple[int, int]] = {}
    for t, dims in enumerate(spec.tensors):
        for d, dim in enumerate(dims):
            if dim.names[0] != ".":
                found.setdefault(dim.names[0], (t, d))
    return tuple(found.values())
