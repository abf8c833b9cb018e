"""Rewrites what draws random numbers as our own operators, which draw by position, numbered in order.

    dropout, attention with dropout          autoddl.dropout, autoddl.attention; at p = 0 they are dropped
    rand, randn, randint and those `_like`   autoddl.draw of this shape
    x.normal_(), uniform_(), bernoulli_(p),
      exponential_(), cauchy_(), ..          likewise: of x the shape alone matters
    bernoulli(p), p a tensor                 draw < p
    normal(mean, std), tensors               mean + std draw, through which no gradient passes
    rrelu(x)                                 x where x > 0, else x draw
    randperm(n)                              the order of n draws
    multinomial(p, n)                        the n largest of p / draw, exponential (Yellott 1977); with replacement
                                             the places of n draws among the running sums of p
    floor(c + rand), 0 < c < 1               1 with probability c, as layers that drop whole samples write it
    poisson, binomial, gamma, dirichlet      quantiles of uniform draws (drawn_variates)
    lstm, gru, rnn with dropout              layers apart, with dropout between them (recurrent_dropout)

Layers that only scale by a draw of zeros and ones, such as stochastic depth, scale by its mean in evaluation.
"""

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import call_arguments, dtype_of, insert, name_of, operators, replace
from autoddl.capture.rewrites.drawing import Law, cast, detached, draw
from autoddl.capture.rewrites.drawn_variates import VARIATES
from autoddl.capture.rewrites.passes import DROPOUTS
from autoddl.capture.rewrites.recurrent_dropout import RECURRENT, layers_apart
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError
from autoddl.operators.kernels import custom_ops

__all__ = ["randomness"]

aten = torch.ops.aten

Values = dict[str, Any]

SHAPED = {"reshape.default", "expand.default", "_to_copy.default", "unsqueeze.default"}
MOST = 2**31
"""The largest range of whole numbers that a word chooses from."""
HIGHEST = {torch.float16: 2**11 + 1, torch.bfloat16: 2**8 + 1, torch.float32: 2**24 + 1, torch.bool: 2,
           torch.uint8: 2**8, torch.int8: 2**7, torch.int16: 2**15, torch.int32: 2**31}
"""The end of the numbers that `x.random_()` chooses from, by dtype."""


def randomness(module: GraphModule) -> None:
    """Replaces every operator that draws by ours; the text above says how.

    Raises CaptureError for one that has no such form.
    """
    key = 0
    for node in operators(module):
        if name_of(node.target) in DROPOUTS:
            key += _dropout(node, key)
        elif name_of(node.target) == "scaled_dot_product_attention.default":
            key += _attention(node, key)
        elif torch.Tag.nondeterministic_seeded in node.target.tags and _draws(node):  # type: ignore[union-attr]
            key += _drawing(node, key)
    module.recompile()


def _dropout(node: Node, key: int) -> bool:
    x, p, train = node.args
    drops = train is not False and bool(p)
    new = insert(node, custom_ops.dropout, (x, p, key), x.meta["val"]) if drops else x  # type: ignore[union-attr]
    for user in list(node.users) if name_of(node.target).startswith("native") else ():
        replace(user, new)
    replace(node, new)
    return drops


def _attention(node: Node, key: int) -> bool:
    values = call_arguments(node)
    if not values["dropout_p"]:
        return False
    replace(node, insert(node, custom_ops.attention, (*values.values(), key), node.meta["val"]))
    return True


def _draws(node: Node) -> bool:
    """Whether an operator that can draw random numbers does: a recurrent one may have no dropout."""
    values = call_arguments(node)
    return values.get("dropout") != 0 and values.get("train") is not False and values.get("training") is not False


def _drawing(node: Node, key: int) -> int:
    """Rewrites one call that draws; returns how often it does. Raises CaptureError where no law has its form."""
    name, values = name_of(node.target), call_arguments(node)
    if name in RECURRENT:
        return layers_apart(node, values, key)
    if name in COMPOSED:
        COMPOSED[name](node, values, key)
        return 1
    law = LAWS[name](node, values) if name in LAWS else None
    if law is None or (law[0] == "whole" and law[2] - law[1] > MOST):
        raise CaptureError(_refusal(node, name, law is not None))
    if law == ("uniform", 0.0, 1.0) and (floor := _floored(node)) is not None:
        _kept(floor, ("kept", float(floor.args[0].args[1]), 0.0), key)  # type: ignore[union-attr, arg-type]
        for unused in (next(iter(node.users)), node):
            unused.graph.erase_node(unused)
    else:
        _kept(node, law, key)
    return 1


def _kept(node: Node, law: Law, key: int) -> None:
    """Draws in the place of a node; what only scales is its mean in evaluation."""
    replace(node, draw(node, law, key, law[1] if law[0] == "kept" and _scales(node) else None))


def _refusal(node: Node, name: str, wide: bool) -> str:
    line = line_of(node.meta.get("stack_trace"))
    if wide:
        return (f"aten.{name} at {line} draws whole numbers from a range of more than 2^31: give it a smaller one, as "
                "randint(0, 2**31, ..)")
    way = "set dropout=0 in it, and put nn.Dropout between its layers" if name.endswith(".data") else \
        "draw it from rand, randn, randint, bernoulli, exponential, poisson or multinomial"
    return (f"aten.{name} at {line} draws random numbers, which would depend on the layout; dropout and most other "
            f"draws go by position: {way}")


def _floored(node: Node) -> Node | None:
    """The node of floor(draw + c), 0 < c < 1, where that is all that reads a draw from [0, 1)."""
    added = _only_reader(node, "add.Tensor")
    floor = None if added is None else _only_reader(added, "floor.default")
    chance = None if added is None or len(added.args) > 2 else added.args[1]
    return floor if isinstance(chance, float) and 0 < chance < 1 else None


def _only_reader(node: Node, name: str) -> Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and name_of(readers[0].target) == name else None


def _scales(node: Node) -> bool:
    """Whether a draw is only multiplied with tensors, perhaps in another shape and by a number first."""
    if not dtype_of(node).is_floating_point or not node.users:
        return False
    return all(_is_scaling(node, reader) for reader in node.users)


def _is_scaling(node: Node, reader: Node) -> bool:
    name, others = name_of(reader.target), [x for x in reader.all_input_nodes if x is not node]
    if name in ("mul.Tensor", "div.Tensor") and not others:
        return reader.args[0] is node is not reader.args[1] and _scales(reader)
    return _scales(reader) if name in SHAPED else name == "mul.Tensor" and len(others) == 1


def _compared(node: Node, values: Values, key: int) -> None:
    """bernoulli(p) of a tensor p: draw < p."""
    p = detached(node, values.get("p", values["self"]))
    drawn = draw(node, ("uniform", 0.0, 1.0), key, like=torch.empty_like(node.meta["val"], dtype=dtype_of(p)))
    truth = insert(node, aten.lt.Tensor, (drawn, p), torch.empty_like(node.meta["val"], dtype=torch.bool))
    replace(node, cast(node, truth, dtype_of(node)))


def _shifted(node: Node, values: Values, key: int) -> None:
    """normal(mean, std), of which one or both are tensors; neither gets a gradient."""
    value = node.meta["val"]
    mean, std = (detached(node, values[name]) for name in ("mean", "std"))
    drawn = draw(node, ("normal", 0.0, 1.0), key)
    scaled = insert(node, aten.mul.Tensor, (drawn, std), value)
    replace(node, insert(node, aten.add.Tensor, (scaled, mean), value))


def _leaky(node: Node, values: Values, key: int) -> None:
    """rrelu (Xu et al. 2015): negative values are scaled by a draw, in evaluation by its mean."""
    low, high, first = values["lower"], values["upper"], node
    if name_of(node.target).startswith("rrelu_with_noise"):
        first = next(user for user in node.users if user.args[1] == 0)
        for other in [user for user in node.users if user is not first]:
            if other.users:
                raise CaptureError(f"{_refusal(node, 'rrelu_with_noise', False)}, as F.rrelu(x) does")
            node.graph.erase_node(other)
    x, value = values["self"], first.meta["val"]
    slope = draw(node, ("uniform", low, high), key, (low + high) / 2, value)
    scaled = insert(node, aten.mul.Tensor, (x, slope), value)
    above = insert(node, aten.gt.Scalar, (x, 0), torch.empty_like(value, dtype=torch.bool))
    found = insert(node, aten.where.self, (above, x, scaled), value)
    replace(first, found)
    if first is not node:
        node.graph.erase_node(node)


def _permuted(node: Node, values: Values, key: int) -> None:
    """randperm(n): the order of n words, whole on every rank."""
    value = node.meta["val"]
    words = draw(node, ("whole", 0, MOST), key, like=torch.empty_like(value, dtype=torch.int64))
    order = insert(node, aten.argsort.stable, (words,), words.meta["val"])
    order.kwargs = {"stable": True}
    replace(node, cast(node, order, value.dtype))


def _chosen(node: Node, values: Values, key: int) -> None:
    """multinomial(p, n): columns of each row, with replacement or without."""
    p, count = detached(node, values["self"]), values["num_samples"]
    weights, value = p.meta["val"], node.meta["val"]
    if not values["replacement"] or count == 1:
        waits = draw(node, ("exponential", 1.0, 0.0), key, like=weights)
        ratio = insert(node, aten.div.Tensor, (p, waits), weights)
        top = insert(node, aten.topk.default, (ratio, count, -1), (torch.empty_like(value, dtype=weights.dtype), value))
        replace(node, insert(node, getitem, (top, 1), value))
        return
    sums = insert(node, aten.cumsum.default, (p, -1), weights)
    total = insert(node, aten.slice.Tensor, (sums, -1, weights.shape[-1] - 1, weights.shape[-1]), weights[..., -1:])
    points = draw(node, ("uniform", 0.0, 1.0), key, like=torch.empty_like(value, dtype=weights.dtype))
    scaled = insert(node, aten.mul.Tensor, (points, total), points.meta["val"])
    found = insert(node, aten.searchsorted.Tensor, (sums, scaled), value)
    found.kwargs = {"right": True}
    replace(node, found)


COMPOSED: Mapping[str, Callable[[Node, Values, int], None]] = {
    "bernoulli.default": _compared, "bernoulli.Tensor": _compared, "normal.Tensor_float": _shifted,
    "normal.float_Tensor": _shifted, "normal.Tensor_Tensor": _shifted, "rrelu.default": _leaky,
    "rrelu_with_noise.default": _leaky, "rrelu_with_noise_functional.default": _leaky, "randperm.default": _permuted,
    "multinomial.default": _chosen, **VARIATES}
"""Draws that are written with other operators."""


def _law(law: str, first: str | float = 0.0, second: str | float = 0.0) -> Callable[[Node, Values], Law | None]:
    """A law with numbers that are arguments of the call, or given."""
    def one(node: Node, values: Values) -> Law | None:
        a, b = (values[x] if isinstance(x, str) else x for x in (first, second))
        return (law, a, b) if isinstance(a, int | float) and isinstance(b, int | float) else None
    return one


def _random(node: Node, values: Values) -> Law | None:
    """x.random_(): whole numbers from 0, as many as the dtype has."""
    high = values.get("to", HIGHEST.get(dtype_of(node), 2**63))
    return "whole", values.get("from") or 0, high


LAWS: Mapping[str, Callable[[Node, Values], Law | None]] = {
    **dict.fromkeys(("rand.default", "rand_like.default"), _law("uniform", 0.0, 1.0)),
    **dict.fromkeys(("randn.default", "randn_like.default"), _law("normal", 0.0, 1.0)),
    **dict.fromkeys(("randint.default", "randint_like.default"), _law("whole", 0, "high")),
    **dict.fromkeys(("randint.low", "randint_like.low_dtype"), _law("whole", "low", "high")),
    **dict.fromkeys(("normal_functional.default", "normal.float_float"), _law("normal", "mean", "std")),
    **dict.fromkeys(("random.default", "random.to", "random.from"), _random),
    "uniform.default": _law("uniform", "from", "to"), "bernoulli.p": _law("kept", "p"),
    "exponential.default": _law("exponential", "lambd"), "cauchy.default": _law("cauchy", "median", "sigma"),
    "log_normal.default": _law("log_normal", "mean", "std"), "geometric.default": _law("geometric", "p")}
"""By operator, the law that its values follow."""
