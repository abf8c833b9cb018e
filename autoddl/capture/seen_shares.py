"""Counts on the sample how many keys FlexAttention computes with: those in blocks of which a query sees one.

    share of a part of the queries = blocks that the mask leaves / all blocks, of 128 queries times 128 keys

A mask reads elements of tensors. Where these follow from inputs, buffers and constants with values, they are computed.
Where they do not, as for a sample on the meta device, what depends on them hides nothing:

    seen(a and b) <= bound(a) and bound(b)        seen(a or b) <= bound(a) or bound(b)        anything else: true

Of long sequences some blocks of queries are looked at, and of a block its first, middle and last row.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from autoddl.core.graph import SEEN_SHARES, Graph, Kind, Op
from autoddl.operators.flexible import FLEXIBLE, parsed_text
from autoddl.operators.kernels.flexible import value_of_text

__all__ = ["with_seen_shares"]

BLOCK = 128
"""Queries and keys of a block, as torch has it."""
PARTS = 16
"""Equal parts of the queries that are counted apart."""
ELEMENTS = 2**24
"""Elements of a mask that are computed at most, about."""
BOTH, EITHER = ("bitwise_and", "logical_and", "__and__"), ("bitwise_or", "logical_or", "__or__")


def with_seen_shares(graph: Graph, program: GraphModule, values: Mapping[str, Any]) -> Graph:
    """The graph whose FlexAttention says what its masks leave; `values` are those of inputs, buffers and constants."""
    if all(op.target != FLEXIBLE or not op.arg("mask") for op in graph.ops):
        return graph
    nodes, known = {node.name: node for node in program.graph.nodes}, dict[Node, Tensor | None]()
    leaves = {node: values.get(tensor.fqn) for node, tensor in zip(
        (node for node in program.graph.nodes if node.op == "placeholder"), graph.tensors, strict=False)
        if tensor.kind is not Kind.PARAMETER}
    found: dict[tuple[Any, ...], tuple[float, ...]] = {}
    ops = []
    for op in graph.ops:
        if op.target == FLEXIBLE and op.arg("mask"):
            shapes = tuple(graph.tensors[t].shape for t in op.inputs[:2])
            alike = (op.arg("mask"), op.inputs[3:], shapes)
            if alike not in found:
                read = [_value(one, leaves, known) for one in nodes[op.name].args[3]]
                found[alike] = _shares(op, shapes[0], shapes[1], read)
            op = replace(op, args=(*op.args, (SEEN_SHARES, found[alike])))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _value(node: Any, leaves: Mapping[Node, Any], known: dict[Node, Tensor | None]) -> Tensor | None:
    """The value of a node on the sample; None where it depends on a weight, or on a tensor without values."""
    if node not in known:
        known[node] = None
        if node.op == "placeholder":
            value = leaves.get(node)
            known[node] = value.detach().cpu() if type(value) is Tensor and not value.is_meta else None
        elif node.op == "call_function" and sum(x.numel() for x in tree_leaves(node.meta.get("val"))) <= ELEMENTS:
            inputs = {x: _value(x, leaves, known) for x in node.all_input_nodes}
            if all(x is not None for x in inputs.values()):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: inputs[x])
                with torch.no_grad():
                    known[node] = node.target(*args, **kwargs)
    return known[node]


def _shares(op: Op, queries: tuple[int, ...], keys: tuple[int, ...], read: list[Tensor | None]) -> tuple[float, ...]:
    """The share of each part of the queries, from first to last."""
    batch, heads, length = queries[:3]
    text, columns = _bound(str(op.arg("mask")), read), keys[-2]
    names = {node.id for node in ast.walk(parsed_text(text)) if isinstance(node, ast.Name)}
    several = (batch if "b" in names or "x" in {name[:1] for name in names} else 1) * (heads if "h" in names else 1)
    blocks = [range(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
    parts = min(PARTS, len(blocks))
    each = max(1, ELEMENTS // max(1, several * 3 * columns * parts))
    found = []
    for part in range(parts):
        mine = blocks[len(blocks) * part // parts:len(blocks) * (part + 1) // parts]
        step = max(1, -(-len(mine) // each))
        looked = mine[step // 2::step]
        found.append(sum(_share(text, rows, (batch, heads, columns), read) for rows in looked) / len(looked))
    return tuple(found)


def _share(text: str, block: range, sizes: tuple[int, int, int], read: list[Tensor | None]) -> float:
    """The share of blocks of keys of which a query of a block sees one, a mean over batch and heads."""
    batch, heads, keys = sizes
    rows = sorted({block[0], block[len(block) // 2], block[-1]})
    known = {"b": torch.arange(batch).view(-1, 1, 1, 1), "h": torch.arange(heads).view(-1, 1, 1),
             "q": torch.tensor(rows).view(-1, 1), "k": torch.arange(keys),
             **{f"x{i}": x for i, x in enumerate(read) if x is not None}}
    seen = torch.as_tensor(value_of_text(text, known, (), torch.float32))
    wide = seen.expand(*(seen.shape if seen.dim() > 1 else (1, 1))[:-2], len(rows), keys).any(-2)
    full = torch.nn.functional.pad(wide, (0, -keys % BLOCK))
    return float(full.unflatten(-1, (-1, BLOCK)).any(-1).double().mean())


def _bound(text: str, read: list[Tensor | None]) -> str:
    """A mask that hides no more than `text`, and reads no tensor whose values are not known."""
    def bound(node: ast.expr) -> str:
        if not any(isinstance(x, ast.Subscript) and read[int(x.value.id[1:])] is None  # type: ignore[attr-defined]
                   for x in ast.walk(node)):
            return ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (*BOTH, *EITHER):
            parts = [bound(x) for x in node.args]
            if "True" not in parts:
                return f"{node.func.id}({', '.join(parts)})"
            rest = [part for part in parts if part != "True"]
            return rest[0] if rest and node.func.id in BOTH else "True"
        return "True"
    return bound(parsed_text(text))
