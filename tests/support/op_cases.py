"""Calls of matrix products and neural network operators, on which their rules are tested: 5, 6 and 7 are uneven."""

import torch
from torch import Tensor

from autoddl.operators.trials.cases import Case, case

generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def labels(classes: int, *shape: int) -> Tensor:
    """Classes, some of them to be ignored."""
    found = ints(classes, *shape)
    found.view(-1)[1::3] = -100
    return found


def truths(*shape: int) -> Tensor:
    """A mask in which every query sees its first key."""
    found = torch.rand(shape, generator=generator) > 0.4
    found[..., 0] = True
    return found


def signs(*shape: int) -> Tensor:
    return torch.where(torch.arange(torch.Size(shape).numel()).view(shape) % 3 > 0, 1.0, -1.0).double()


PRODUCTS = [
    case("aten.linear.default", f(5, 6), f(7, 6), f(7)),
    case("aten.linear.default", f(6, 5, 6), f(7, 6)),
    case("aten.linear.default", f(3, 5, 6), f(8, 6), f(8)),
    case("aten.linear.default", f(6), f(5, 6)),
    case("aten.mm.default", f(5, 6), f(6, 7)),
    case("aten.mm.default", f(6, 7), f(7, 4)),
    case("aten.bmm.default", f(3, 5, 6), f(3, 6, 7)),
    case("aten.bmm.default", f(6, 1, 7), f(6, 7, 5)),
    case("aten.mv.default", f(5, 6), f(6)),
    case("aten.mv.default", f(6, 7), f(7)),
    case("aten.dot.default", f(6), f(6)),
    case("aten.dot.default", f(7), f(7)),
    case("aten.matmul.default", f(5, 6), f(6, 7)),
    case("aten.matmul.default", f(5, 6), f(6)),
    case("aten.matmul.default", f(6), f(3, 6, 5)),
    case("aten.matmul.default", f(5, 1, 4, 6), f(6, 6, 7)),
    case("aten.matmul.default", f(3, 6, 5, 4), f(1, 6, 4, 7)),
    case("aten.addmm.default", f(7), f(5, 6), f(6, 7)),
    case("aten.addmm.default", f(5, 7), f(5, 6), f(6, 7), beta=0.5, alpha=2.0),
    case("aten.addmm.default", f(5, 1), f(5, 6), f(6, 7)),
    case("aten.baddbmm.default", f(3, 5, 7), f(3, 5, 6), f(3, 6, 7)),
    case("aten.baddbmm.default", f(1, 7), f(5, 4, 6), f(5, 6, 7), beta=2.0),
    case("aten.einsum.default", "bik,bkj->bij", [f(3, 5, 6), f(3, 6, 7)]),
    case("aten.einsum.default", "bi,bi,ij->bj", [f(5, 6), f(1, 6), f(6, 7)]),
    case("aten.einsum.default", "ii->i", [f(6, 6)]),
    case("aten.conv1d.default", f(5, 6, 9), f(7, 6, 3), f(7), [1], [1]),
    case("aten.conv1d.default", f(6, 7, 8), f(4, 7, 2), None, [2]),
    case("aten.conv2d.default", f(5, 6, 5, 5), f(7, 6, 3, 3), f(7), [1, 1], [1, 1]),
    case("aten.conv2d.default", f(3, 6, 4, 4), f(12, 1, 3, 3), f(12), [2, 2], [1, 1], [1, 1], 6),
    case("aten.conv2d.default", f(2, 8, 4, 4), f(12, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], 4),
    case("aten.conv2d.default", f(6, 5, 5), f(4, 6, 2, 2), f(4)),
    case("aten.conv3d.default", f(5, 6, 3, 3, 3), f(7, 6, 2, 2, 2), f(7)),
    case("aten.conv3d.default", f(2, 6, 3, 3, 3), f(6, 3, 2, 2, 2), None, [1, 1, 1], [1, 1, 1], [1, 1, 1], 2),
    case("aten.conv1d.padding", f(5, 6, 7), f(7, 6, 3), f(7), [1], "same"),
    case("aten.conv1d.padding", f(3, 4, 7), f(6, 2, 3), None, [1], "valid", [1], 2),
    case("aten.conv2d.padding", f(5, 6, 4, 4), f(7, 6, 3, 3), f(7), [1, 1], "same"),
    case("aten.conv2d.padding", f(2, 6, 4, 4), f(6, 1, 3, 3), f(6), [1, 1], "valid", [1, 1], 6),
    case("aten.conv_transpose1d.default", f(5, 6, 5), f(6, 7, 3), f(7), [2]),
    case("aten.conv_transpose1d.default", f(3, 6, 5), f(6, 2, 3), None, [1], [0], [0], 3),
    case("aten.conv_transpose2d.input", f(5, 6, 4, 4), f(6, 7, 2, 2), f(7), [2, 2]),
    case("aten.conv_transpose2d.input", f(2, 6, 4, 4), f(6, 3, 2, 2), f(18), [2, 2], [0, 0], [0, 0], 6),
    case("aten.convolution.default", f(5, 6, 5, 5), f(7, 6, 3, 3), f(7), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    case("aten.convolution.default", f(5, 6, 4, 4), f(6, 7, 2, 2), f(7), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    case("aten.convolution.default", f(2, 6, 4), f(9, 2, 2), None, [1], [0], [1], False, [0], 3),
]

SDPA = "aten.scaled_dot_product_attention.default"
OURS = "autoddl.attention"
ATTENTION = [
    case(SDPA, f(3, 6, 5, 4), f(3, 6, 7, 4), f(3, 6, 7, 5)),
    case(SDPA, f(2, 3, 7, 4), f(2, 3, 7, 4), f(2, 3, 7, 4), None, 0.0, True),
    case(SDPA, f(2, 3, 7, 4), f(2, 3, 5, 4), f(2, 3, 5, 4), None, 0.0, True, scale=0.3),
    case(SDPA, f(5, 6, 7, 4), f(5, 3, 7, 4), f(5, 3, 7, 4), None, 0.0, True, enable_gqa=True),
    case(SDPA, f(2, 12, 5, 4), f(2, 6, 7, 4), f(2, 6, 7, 4), truths(2, 1, 5, 7), enable_gqa=True),
    case(SDPA, f(2, 4, 5, 4), f(2, 4, 7, 4), f(2, 4, 7, 4), truths(5, 7)),
    case(SDPA, f(3, 5, 6, 4), f(3, 5, 7, 4), f(3, 5, 7, 4), f(1, 5, 6, 7)),
    case(SDPA, f(3, 5, 6, 4), f(3, 5, 7, 4), f(3, 5, 7, 4), f(3, 1, 1, 7)),
    case(SDPA, f(6, 5, 4), f(6, 7, 4), f(6, 7, 4)),
    case(SDPA, f(3, 4, 12, 4), f(3, 2, 12, 4), f(3, 2, 12, 4), None, 0.0, True, enable_gqa=True),
    case(SDPA, f(3, 2, 6, 4), f(3, 2, 12, 4), f(3, 2, 12, 4), truths(3, 1, 6, 12)),
    case(OURS, f(3, 6, 5, 4), f(3, 6, 7, 4), f(3, 6, 7, 5), None, 0.3, dropout_key=1),
    case(OURS, f(2, 3, 7, 4), f(2, 3, 7, 4), f(2, 3, 7, 4), None, 0.2, True, dropout_key=2),
    case(OURS, f(3, 6, 7, 4), f(3, 3, 7, 4), f(3, 3, 7, 4), truths(3, 1, 7, 7), 0.2, True, 0.5, True, 3),
    case(OURS, f(2, 4, 5, 4), f(2, 4, 7, 4), f(2, 4, 7, 4), f(1, 4, 5, 7), 0.4, True, dropout_key=4),
]

LEGIT = "aten._native_batch_norm_legit_functional.default"
FROZEN = "aten._native_batch_norm_legit_no_training.default"
NORMS = [
    case("aten.layer_norm.default", f(5, 6, 7), [7], f(7), f(7)),
    case("aten.layer_norm.default", f(6, 3, 4), [3, 4]),
    case("aten.native_layer_norm.default", f(5, 6, 7), [7], f(7), f(7), 1e-5),
    case("aten.native_layer_norm.default", f(6, 7), [7], f(7), None, 1e-5),
    case("aten.rms_norm.default", f(5, 6, 7), [7], f(7)),
    case("aten.rms_norm.default", f(6, 7), [7], None, 1e-6),
    case("aten.group_norm.default", f(5, 6, 4), 3, f(6), f(6)),
    case("aten.group_norm.default", f(6, 12, 2, 3), 6),
    case("aten.group_norm.default", f(4, 6, 5), 1, f(6), f(6)),
    case("aten.group_norm.default", f(4, 6, 5), 6, f(6), f(6)),
    case(LEGIT, f(5, 6, 3, 3), f(6), f(6), f(6), positive(6), True, 0.1, 1e-5),
    case(LEGIT, f(6, 7, 4), f(7), None, f(7), positive(7), True, 0.3, 1e-5),
    case(LEGIT, f(7, 5) + 100, None, None, f(5), positive(5), True, 0.1, 1e-3),
    case(LEGIT, f(5, 6, 3, 3), f(6), f(6), f(6), positive(6), False, 0.1, 1e-5),
    case(FROZEN, f(5, 6, 3, 4), f(6), f(6), f(6), positive(6), 0.1, 1e-5),
    case(FROZEN, f(6, 7), None, None, f(7), positive(7), 0.1, 1e-5),
    case("aten.softmax.int", f(5, 6, 7), -1),
    case("aten.softmax.int", f(6, 7), 0),
    case("aten.log_softmax.int", f(5, 6, 7), 1),
    case("aten.log_softmax.int", f(7, 6), -1),
    case("aten._softmax.default", f(5, 6), 1, False),
    case("aten._softmax.default", f(6, 5, 7), 1, False),
    case("aten._log_softmax.default", f(5, 6), 1, False),
    case("aten._log_softmax.default", f(7, 5, 6), 0, False),
    case("aten._safe_softmax.default", f(5, 6), -1),
    case("aten._safe_softmax.default", f(6, 7, 3), 1),
]

LOSSES = [
    case("autoddl.token_loss", f(7, 6), labels(6, 7)),
    case("autoddl.token_loss", f(6, 7) * 30, labels(7, 6), positive(7), -100, 0.1),
    case("autoddl.token_loss", f(5, 7, 6), labels(7, 5, 6)),
    case("autoddl.token_loss", f(5, 6) - 50, ints(6, 5), None, 2, 0.2),
    case("autoddl.token_loss", f(7), torch.tensor(3)),
    case("autoddl.token_weight", labels(6, 7)),
    case("autoddl.token_weight", labels(7, 5, 6), positive(7), dtype=torch.float64),
    case("aten.cross_entropy_loss.default", f(7, 6), labels(6, 7), None, 0),
    case("aten.cross_entropy_loss.default", f(5, 7, 6), labels(7, 5, 6), positive(7), 0, -100, 0.1),
    case("aten.cross_entropy_loss.default", f(7, 6), labels(6, 7), None, 2),
    case("aten.cross_entropy_loss.default", f(7, 6), labels(6, 7), None, 1),
    case("aten.cross_entropy_loss.default", f(5, 6), f(5, 6).softmax(1), None, 2),
    case("aten.nll_loss.default", f(7, 6), labels(6, 7), None, 0),
    case("aten.nll_loss.default", f(5, 6), labels(6, 5), positive(6), 2),
    case("aten.nll_loss_nd.default", f(6, 7, 5), labels(7, 6, 5), None, 0),
    case("aten.nll_loss_nd.default", f(5, 6), labels(6, 5), positive(6), 2),
    *(case(f"aten.{name}.default", f(*shape), f(*shape), reduction=reduction)
      for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
      for shape, reduction in (((5, 6), 0), ((7, 6), 1), ((6, 7), 2), ((5,), 1))),
    *(case(f"aten.{name}.default", positive(*shape), positive(*shape), reduction=reduction)
      for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
      for shape, reduction in (((5, 6), 0), ((7, 6), 1), ((6, 7), 2))),
    case("aten.binary_cross_entropy_with_logits.default", f(5, 6), positive(5, 6), positive(6), positive(1)),
]

LOSSES += [case("aten.poisson_nll_loss.default", f(5, 6), positive(5, 6), True, False, 1e-8, how) for how in (0, 1)]
LOSSES += [case("aten.margin_ranking_loss.default", f(5, 6), f(5, 6), signs(5, 6), 0.1, how) for how in (0, 1)]
LOSSES += [case(f"aten.{name}.default", f(5, 6), signs(5, 6), reduction=how)
           for name in ("soft_margin_loss", "hinge_embedding_loss") for how in (1, 2)]
LOSSES += [case("aten.triplet_margin_loss.default", f(*shape), f(*shape), f(*shape), reduction=how)
           for shape, how in (((5, 6), 0), ((7, 4), 1), ((6, 5), 2))]
LOSSES += [case("aten.cosine_embedding_loss.default", f(*shape, 4), f(*shape, 4), signs(*shape), reduction=how)
           for shape, how in (((5,), 0), ((7,), 1), ((6,), 2))]
LOSSES += [case("autoddl.checked", f(*shape), torch.tensor(value), value, "x > 0 at line 1")
           for shape, value in (((5, 6), True), ((), False))]

EMBEDDING = "aten.embedding.default"
OTHERS = [
    case(EMBEDDING, f(7, 6), ints(7, 5, 6)),
    case(EMBEDDING, f(6, 5), ints(6, 7), 2),
    case(EMBEDDING, f(6, 5), ints(6, 7), -1, True),
    case(EMBEDDING, f(10, 4), ints(10, 3, 2, 5), 7),
    case("autoddl.dropout", f(5, 6, 7), 0.3, 1),
    case("autoddl.dropout", f(6, 7), 0.5, 2),
    case("autoddl.ctc_loss", f(7, 5, 4).log_softmax(-1), ints(3, 5, 3) + 1, torch.tensor([7, 7, 6, 5, 7]),
         torch.tensor([3, 2, 2, 1, 3])),
    case("autoddl.ctc_loss", f(6, 6, 5).log_softmax(-1), ints(3, 6, 2), torch.full((6,), 6), torch.full((6,), 1),
         4, True),
    case("autoddl.variate", positive(4, 6), "gamma", positive(4, 6)),
    case("autoddl.variate", positive(5, 6, 7), "binomial", ints(9, 5, 6, 7).double(), positive(6, 1)),
    case("autoddl.draw", [5, 6, 7], "normal", 0.0, 1.0, torch.float64, key=1),
    case("autoddl.draw", [6, 7], "whole", 0, 9, torch.int64, key=2), case("autoddl.draw", [], "uniform", 0.0, 1.0,
                                                                          torch.float64),
    case("aten.max_pool1d.default", f(5, 6, 7), [2]),
    case("aten.max_pool1d.default", f(6, 7), [3], [2], [1]),
    case("aten.max_pool2d.default", f(5, 6, 6, 6), [2, 2], [2, 2]),
    case("aten.max_pool2d.default", f(6, 7, 5), [3, 3], [2, 2], [1, 1]),
    case("aten.max_pool2d_with_indices.default", f(5, 6, 6, 6), [2, 2]),
    case("aten.max_pool2d_with_indices.default", f(6, 7, 5, 5), [3, 3], [1, 1], [1, 1]),
    case("aten.max_pool3d.default", f(5, 6, 4, 4, 4), [2, 2, 2]),
    case("aten.max_pool3d.default", f(6, 7, 3, 3, 3), [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    case("aten.avg_pool1d.default", f(5, 6, 7), [2]),
    case("aten.avg_pool1d.default", f(6, 7, 6), [3], [1], [1]),
    case("aten.avg_pool2d.default", f(5, 6, 6, 6), [2, 2]),
    case("aten.avg_pool2d.default", f(6, 7, 5, 5), [3, 3], [2, 2], [1, 1]),
    case("aten.avg_pool3d.default", f(5, 6, 4, 4, 4), [2, 2, 2]),
    case("aten.avg_pool3d.default", f(6, 7, 3, 3, 3), [3, 3, 3]),
    case("aten.adaptive_avg_pool1d.default", f(5, 6, 7), [3]),
    case("aten.adaptive_avg_pool1d.default", f(6, 7, 5), [1]),
    case("aten.adaptive_avg_pool2d.default", f(5, 6, 6, 6), [2, 2]),
    case("aten.adaptive_avg_pool2d.default", f(6, 7, 5, 5), [1, 1]),
    case("aten._adaptive_avg_pool2d.default", f(5, 6, 6, 6), [3, 3]),
    case("aten._adaptive_avg_pool2d.default", f(6, 7, 5, 5), [2, 2]),
    case("aten.adaptive_avg_pool3d.default", f(5, 6, 4, 4, 4), [2, 2, 2]),
    case("aten.adaptive_avg_pool3d.default", f(6, 7, 3, 3, 3), [1, 1, 1]),
]


def routed(tokens: int, experts: int, choices: int = 2, skewed: bool = False) -> Tensor:
    """Different experts for every token; where `skewed`, expert 0 always and the last never."""
    scores = torch.rand(tokens, experts, generator=generator)
    if skewed:
        scores[:, 0], scores[:, -1] = 2.0, -1.0
    return scores.topk(choices, 1).indices


OF_GPT_OSS = "mul(add(clamp(b, -0.5, 0.5), 1), mul(clamp(a, None, 0.5), sigmoid(mul(clamp(a, None, 0.5), 1.702))))"
GROUPED = [case("autoddl.grouped_mm", f(9, 6), f(4, 6, 5), torch.tensor([2, 2, 6, 9])),
           case("autoddl.grouped_mm", f(7, 5), f(5, 5, 4), torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32))]
EXPERTS = [
    case("autoddl.experts", f(6, 8), routed(6, 4), positive(6, 2), f(4, 10, 8), f(4, 7, 5)),
    case("autoddl.experts", f(7, 6), routed(7, 5, 3, True), positive(7, 3), f(5, 8, 6), f(5, 6, 4), f(5, 8), f(5, 6)),
    case("autoddl.experts", f(6, 4), routed(6, 3, 2, True), positive(6, 2), f(3, 4, 12), f(3, 6, 4), f(3, 12), f(3, 4),
         gate=OF_GPT_OSS, paired=True, transposed=True),
    case("autoddl.experts", f(5, 4), routed(5, 4, 1, True), positive(5, 1), f(4, 6, 4), f(4, 4, 6),
         gate="gelu(a, approximate='tanh')", halves=1),
    case("autoddl.experts", f(6, 4), routed(6, 4, 2), positive(6, 2), f(4, 4, 8), f(4, 4, 6), transposed=True),
]

DOCUMENTS = "bitwise_and(ge(q, k), eq(x0[b, q], x0[b, k]))"
FLEXIBLE = [
    case("autoddl.flex_attention", f(5, 6, 7, 4), f(5, 6, 7, 4), f(5, 6, 7, 3), mask="ge(q, k)"),
    case("autoddl.flex_attention", f(3, 6, 7, 4), f(3, 3, 7, 4), f(3, 3, 7, 4), [ints(2, 3, 7).sort(1).values],
         mask=DOCUMENTS, scale=0.3, lse=True),
    case("autoddl.flex_attention", f(2, 4, 6, 4), f(2, 2, 9, 4), f(2, 2, 9, 5), [f(4), f(6, 9), ints(2, 6), f(15)],
         score="add(add(mul(tanh(s), x0[h]), x1[q, k]), x3[add(sub(q, k), 8)])", mask="gt(x2[q], 0)", lse=True),
    case("autoddl.flex_attention", f(3, 4, 5, 4), f(1, 4, 6, 4), f(1, 4, 6, 4), [f(3, 4)],
         score="where(lt(abs(sub(q, k)), 2), add(s, as_float(sub(q, k))), mul(s, x0[b, h]))"),
]

CASES: list[Case] = [*PRODUCTS, *ATTENTION, *FLEXIBLE, *NORMS, *LOSSES, *GROUPED, *EXPERTS, *OTHERS]
