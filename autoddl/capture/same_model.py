"""Says in which part a module is not the one that a plan was made for.

    parameters    by name and shape: those of the plan's graph, with their other names where they are tied
    inputs        by name, shape and dtype: those of the plan's sample, which is one microbatch

Both are known without capturing. Modules that are alike so far may have other operators, which `check_captured` tells.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture.sample import Sample, from_spec, named, parted
from autoddl.core.errors import MismatchError
from autoddl.core.graph import Graph, Kind, graph_from_text
from autoddl.core.plan import Plan

if TYPE_CHECKING:
    from autoddl.capture.capture import Captured

__all__ = ["check_captured", "check_same_model", "shapes_of"]


def check_same_model(plan: Plan, module: nn.Module, batch: Sample) -> None:
    """Raises MismatchError where parameters or inputs of `module` and a global batch are not those of the plan."""
    _check_parts(plan, module, parted(batch, plan.microbatches))


def check_captured(plan: Plan, module: nn.Module, captured: "Captured") -> None:
    """Raises MismatchError where the graph of `module`, captured with one microbatch, is not the plan's."""
    found, made = captured.graph.fingerprint(), plan.fingerprints.get("model")
    if found == made:
        return
    _check_parts(plan, module, from_spec(captured.spec, "meta"))
    said = ""
    if "graph" in plan.source:
        said = _other_op(graph_from_text(plan.source["graph"]), captured.graph)
    raise _error(plan, said or f"its graph is {found}, and {made} in the plan, with the same parameters, inputs and "
                               "kinds of operators. Where it goes through sets, set PYTHONHASHSEED=0 wherever it is "
                               "planned and run")


def _error(plan: Plan, said: str) -> MismatchError:
    return MismatchError(f"the plan was made for another model than this one: {said}. A plan fits one architecture, "
                         "size, dtype, mode (train or eval) and batch shape: plan again, or give its "
                         f"model{_whose(plan)}")


def _whose(plan: Plan) -> str:
    """The factory of the plan, in words; "" where it has none."""
    settings = ", ".join(f"{name}={value}" for name, value in plan.factory.get("arguments", {}).items())
    return f", {plan.factory['name']}" + f" with {settings}" * bool(settings) if "name" in plan.factory else ""


def _check_parts(plan: Plan, module: nn.Module, sample: Sample) -> None:
    """Raises MismatchError where a parameter or an input differs. `sample` is one microbatch."""
    if "graph" not in plan.source:
        return
    said = _other_parameter(graph_from_text(plan.source["graph"]), module)
    if said:
        raise _error(plan, said)
    said = _other_input(*(shapes_of(module, one) for one in (from_spec(plan.sample, "meta"), sample)))
    if said:
        made = f"{_whose(plan).replace(', ', ', as ', 1)} makes it" if _whose(plan) else ""
        also = "".join(f", or for batches of {_said(one['sample'])}" for one in plan.source.get("samples", ()))
        raise MismatchError(f"the plan is for other batches than this one: {said}{also}. Give such a "
                            f"batch{made}, or plan for this one, alone or as one of --samples")


def _other_parameter(known: Graph, module: nn.Module) -> str:
    planned = {name: t.shape for t in known.tensors if t.kind is Kind.PARAMETER for name in (t.fqn, *t.aliases)}
    found = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    for name, shape in planned.items():
        if name not in found:
            return f"it has no parameter {name}, which the plan has"
        if found[name] != shape:
            return f"its parameter {name} has the shape {list(found[name])}, and {list(shape)} in the plan"
    return next((f"the plan has no parameter {name}, which it has" for name in found if name not in planned), "")


def _said(spec: Mapping[str, Any]) -> str:
    """The tensors of a described sample, as text."""
    made = from_spec(spec, "meta")
    leaves = pytree.tree_leaves((made.args, dict(made.kwargs)))
    return " and ".join(_text(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def shapes_of(module: nn.Module, sample: Sample) -> dict[str, str]:
    """By name, the tensors of a call of `module`, as text."""
    return {name: _text(leaf) for name, leaf in named(module.forward, sample).items() if isinstance(leaf, Tensor)}


def _text(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _other_input(planned: Mapping[str, str], found: Mapping[str, str]) -> str:
    for name in (*planned, *found):
        one, other = planned.get(name, "not there"), found.get(name, "not there")
        if one != other:
            return f"input {name} is {other} in a microbatch, and {one} in the plan"
    return ""


def _other_op(known: Graph, found: Graph) -> str:
    """The first operator that differs, in words; "" where all are of the same kinds."""
    for one, other in zip_longest(known.ops, found.ops):
        if one is None or other is None or one.target != other.target:
            here = "ends" if other is None else f"has {other.target} in {other.module or 'forward'}"
            return f"its program {here} where the plan's {'ends' if one is None else f'has {one.target}'}"
    return ""
