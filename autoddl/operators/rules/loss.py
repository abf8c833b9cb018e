"""Rules of losses.

    token loss       "t v, t -> / | sum"     a sum over tokens; v by a reduction inside the kernel (`Signature.inner`)
    token weight     "t -> / | sum"          the number of valid tokens
    checked          "a b, / -> a b | 0"     labels or a loss, with a condition that every rank sees
    squared error    "a b, a b -> / | sum"   a mean is a sum whose local part is scaled (kernels)
    ctc loss         "t b ., b ., b, b -> b"    one number for each row, whose steps t are whole
    triplets         "a ., a ., a . -> / | sum"     likewise, one number for each row
"""

from autoddl.core.graph import Op
from autoddl.core.layout import B, Split
from autoddl.operators.rules.dimension_strings import Rule, Signature
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, fixed, form, get, names, rule_text

__all__ = ["RULES"]


def _class_loss(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Logits b v x.. or v, targets b x.. (or probabilities like the logits), class weights whole; tokens split.
    Reduction 0 keeps the tokens, 2 sums them, 1 divides by a count of them all and is not split."""
    logits, target = inputs[0].shape, inputs[1].shape
    tokens = names(len(logits) - 1, "t")
    reduction = 2 if op.target == "autoddl.token_loss" else int(str(op.arg("reduction")))
    if reduction == 1:
        return Rule(fixed(inputs, outputs))
    full = [*tokens[:1], ".", *tokens[1:]]
    given = [full if target == logits and inputs[1].is_floating else tokens, *(["."] for _ in inputs[2:])]
    string = rule_text([full, *given], [tokens if reduction == 0 else []], " | sum" if reduction else "")
    return Rule(string, _vocabulary(op, inputs) if op.target == "autoddl.token_loss" else ())


def _vocabulary(op: Op, inputs: Tensors) -> tuple[Signature, ...]:
    """Logits split along the vocabulary, class weights with them or not, target and loss B; the kernel reduces."""
    dim = min(1, len(inputs[0].shape) - 1)
    if inputs[1].is_floating or inputs[0].shape[dim] == 1:
        return ()
    return (Signature((Split(dim), *(B for _ in inputs[1:])), (B,), "v", (), True),)


def _token_weight(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return rule_text([names(len(inputs[0].shape), "t"), *(["."] for _ in inputs[1:])], [[]], " | sum")


def _checked(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    dims = names(len(inputs[0].shape))
    return rule_text([dims, ["."] * len(inputs[1].shape)], [dims], form(inputs, outputs, ((0,),)))


def _sequences(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Log-probabilities t b c, targets b s, lengths b and b: a loss for each b."""
    return rule_text([[".", "b", "."], ["b", "."], ["b"], ["b"]], [["b"]])


def _distance(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Losses of pairs of elements: reduction 0 keeps the elements, 1 and 2 sum over them (a mean is scaled)."""
    shape = max((t.shape for t in inputs[:2]), key=len)
    if any(t.shape != shape for t in inputs[:2]):
        return fixed(inputs, outputs)
    dims = names(len(shape))
    kept = get(op, "reduction", 1) == 0
    return rule_text((aligned(t.shape, shape, dims) for t in inputs), [dims if kept else []], "" if kept else " | sum")


def _rows(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Losses of rows, which lie along the last dim of the first input; a target has a number for each row."""
    first = inputs[0].shape
    dims = names(len(first) - 1)
    if any(t.shape not in (first, first[:-1]) for t in inputs):
        return fixed(inputs, outputs)
    kept = get(op, "reduction", 1) == 0
    given = [[*dims, "."] if len(t.shape) == len(first) else dims for t in inputs]
    return rule_text(given, [dims if kept else []], "" if kept else " | sum")


RULES: dict[str, RuleOf] = {
    "autoddl.token_loss": _class_loss,
    "autoddl.token_weight": _token_weight,
    "autoddl.checked": _checked,
    "autoddl.ctc_loss": _sequences,
    "aten.cross_entropy_loss.default": _class_loss,
    "aten.nll_loss.default": _class_loss,
    "aten.nll_loss_nd.default": _class_loss,
    "aten.mse_loss.default": _distance,
    "aten.l1_loss.default": _distance,
    "aten.smooth_l1_loss.default": _distance,
    "aten.huber_loss.default": _distance,
    "aten.binary_cross_entropy.default": _distance,
    "aten.binary_cross_entropy_with_logits.default": _distance,
    "aten.kl_div.default": _distance,
    "aten.poisson_nll_loss.default": _distance,
    "aten.soft_margin_loss.default": _distance,
    "aten.hinge_embedding_loss.default": _distance,
    "aten.margin_ranking_loss.default": _distance,
    "aten.triplet_margin_loss.default": _rows,
    "aten.cosine_embedding_loss.default": _rows,
}
