"""Writes out the casts that `torch.autocast` makes inside a module, in the exported program, before it is functional.

The casts are those of bf16-mixed (`autocast`), for any device type that a region names. The program that is planned
runs on the cluster's devices, whatever device the module was written for.
"""

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import name_of, operators, replace
from autoddl.capture.rewrites.autocast import Caster, base_name
from autoddl.capture.rewrites.autocast_region import Region, region_of
from autoddl.capture.rewrites.passes import CHECKS

__all__ = ["cast_regions", "use_cast"]


def cast_regions(module: GraphModule) -> None:
    """Casts the inputs of operators in regions of autocast, in place; nothing happens without such a region."""
    if not any(region_of(node) is Region.ON for node in module.graph.nodes):
        return
    writes = any(node.target._schema.is_mutable for node in operators(module))  # type: ignore[union-attr]
    caster, changed = Caster(module, writes), set[Node]()
    for node in [node for node in module.graph.nodes if node.op == "call_function"]:
        if name_of(node.target) in CHECKS:  # these name the dtypes of the trace
            module.graph.erase_node(node)
            continue
        if region_of(node) is Region.ON:
            before = node.all_input_nodes
            caster.cast_inputs(node)
            changed |= {node} if node.all_input_nodes != before else set()
        if node in changed or not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
            caster.renew(node)
    module.recompile()


def use_cast(program: GraphModule, parameters: Iterable[str]) -> None:
    """Gives parameters that are only read after the cast of a region the dtype of this cast, in place."""
    holes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for hole in (holes[name] for name in parameters):
        casts = list(hole.users)
        dtypes = {cast.meta["val"].dtype for cast in casts if _is_cast(cast)}
        if len(dtypes) == 1 and all(map(_is_cast, casts)) and hole.meta["val"].dtype is torch.float32:
            hole.meta = {**hole.meta, "val": casts[0].meta["val"]}
            for cast in casts:
                replace(cast, hole)
    program.recompile()


def _is_cast(node: Node) -> bool:
    return base_name(node) == "_to_copy" and region_of(node) is Region.ON
