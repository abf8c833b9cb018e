"""The rule of FlexAttention (`operators.flexible`): batch, heads (groups of them in GQA) and queries.

    q "b h l .", k "b h . .", v "b h . .", read tensors -> "b h l ."          and the log-sum-exp "b h l"

The length may be split inside of the kernel too (`rules.ring`). There every other tensor is whole.

A tensor that is read at [b, ..] alone, and has a row for each of the batch, splits with the batch. Likewise a dim that
is read at h or q alone. Every other tensor is whole, and the gradient of one that is trained is a partial sum.
"""

from autoddl.core.graph import Op
from autoddl.operators.flexible import FLEXIBLE, index_reads
from autoddl.operators.rules.dimension_strings import Rule
from autoddl.operators.rules.ring import QUERIES, ring_signatures
from autoddl.operators.rules.writing import RuleOf, Tensors, get, rule_text

__all__ = ["RULES"]


def _flex_attention(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    batch, heads, queries, _ = inputs[0].shape
    groups = inputs[1].shape[1]
    of_heads = "h" if groups == heads else f"(h:{groups} r)"
    names = {"b": ("b", batch), "h": (of_heads, heads), "q": (QUERIES, queries)}
    reads = index_reads((str(get(op, "score")), str(get(op, "mask"))))
    read = [[_name(names, at, size) for at, size in zip(reads.get(i, ("",) * len(t.shape)), t.shape, strict=True)]
            for i, t in enumerate(inputs[3:])]
    keys = [["b" if t.shape[0] == batch else ".", "h", ".", "."] for t in inputs[1:3]]
    out = ["b", of_heads, QUERIES]
    return Rule(rule_text([[*out, "."], *keys, *_once(read)], [[*out, "."], out][:len(outputs)]),
                ring_signatures(op, inputs, len(outputs)))


def _name(names: dict[str, tuple[str, int]], at: str, size: int) -> str:
    """The name of a dim of `size` that is read at an index."""
    name, whole = names.get(at, (".", size))
    return name if size == whole else "."


def _once(tensors: list[list[str]]) -> list[list[str]]:
    """Splits no dim of a tensor whose dims have one name, as of a table read at [q, q]."""
    return [["." if name != "." and dims.count(name) > 1 else name for name in dims] for dims in tensors]


RULES: dict[str, RuleOf] = {FLEXIBLE: _flex_attention}
