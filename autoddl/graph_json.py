"""Graph <-> text: what a plan keeps of the model, so that it can be explained without the model.

    {"words": [...], "values": [...], "tensors": [[...], ...], "ops": [[...], ...], "outputs": [...], "updates": [...]}

Every text stands once in `words`, every set of slots or arguments once in `values`; rows hold their positions. Blocks
that repeat differ in numbers only. A tuple is written as a list; nothing else of a Graph is one.
"""

import json
from typing import Any

from autoddl.errors import InputError
from autoddl.graph import Graph, Kind, Op, Tensor

__all__ = ["graph_from_text", "graph_to_text"]


class _Table:
    """Values in the order in which they were first met."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, value: object) -> int:
        return self.index.setdefault(json.dumps(value, separators=(",", ":"), ensure_ascii=False), len(self.index))

    @property
    def listed(self) -> list[Any]:
        return [json.loads(text) for text in self.index]


def graph_to_text(graph: Graph) -> str:
    """`graph` as one line."""
    word, value = _Table(), _Table()
    tensors = [[word(t.name), t.shape, word(t.dtype), word(t.kind), word(t.fqn), [word(a) for a in t.aliases],
                int(t.trained)] for t in graph.tensors]
    ops = [[word(op.name), word(op.target), op.inputs, value(op.slots), op.outputs, value(op.args), word(op.module),
            word(op.source)] for op in graph.ops]
    tree = {"words": word.listed, "values": value.listed, "tensors": tensors, "ops": ops, "outputs": graph.outputs,
            "updates": graph.updates}
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def graph_from_text(text: str) -> Graph:
    """The graph that `graph_to_text` wrote; anything else is an InputError."""
    try:
        tree = json.loads(text)
        words, values = tree["words"], [_frozen(value) for value in tree["values"]]
        tensors = tuple(Tensor(words[name], tuple(shape), words[dtype], Kind(words[kind]), words[fqn],
                               tuple(words[a] for a in aliases), bool(trained))
                        for name, shape, dtype, kind, fqn, aliases, trained in tree["tensors"])
        ops = tuple(Op(words[name], words[target], tuple(inputs), values[slots], tuple(outputs), values[args],
                       words[module], words[source])
                    for name, target, inputs, slots, outputs, args, module, source in tree["ops"])
        return Graph(tensors, ops, tuple(tree["outputs"]), tuple((old, new) for old, new in tree["updates"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"the plan's graph cannot be read ({error!r}): make the plan again") from None


def _frozen(value: Any) -> Any:
    """Lists -> tuples, at every depth."""
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
