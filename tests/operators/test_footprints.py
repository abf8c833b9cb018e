"""What an operator holds while it runs, forward and backward, against what is allocated: at the peak and between."""

import pytest
import torch
from held import measured
from op_cases import OF_GPT_OSS, routed
from torch import Tensor

from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.trials.cases import Case, case

NEAR = 0.03
"""Of the largest tensor."""


def foreseen(one: Case, needs: tuple[int, ...]) -> tuple[float, float, float]:
    """The same of the footprint."""
    reads = tuple(Value(k, t.shape, contiguous(t.shape), t.itemsize) for k, t in enumerate(one.inputs))
    out, sizes = one.outputs[0].shape, [t.nbytes for t in one.outputs]
    held = footprint_of(LocalOp(one.op, reads, tuple(t.shape for t in one.outputs),
                                tuple(t.itemsize for t in one.outputs), needs, on_cpu=True))
    forward = max(held.before, sum(sizes) + held.beside + held.during + held.slack)
    kept = held.beside + sum(sizes[k] for k in held.keeps)
    made = [sizes[0] if held.output_shaped else reads[k].nbytes for k in needs if k not in held.passes]
    most = kept + sizes[0] + sum(made)
    late = sum(made) + held.late if held.late else 0.0
    smaller = [reads[k].nbytes for k in needs if held.output_shaped and reads[k].shape != out]
    return forward, kept, max(most + held.back, late, most + max(smaller, default=0))


def wide(*shape: int) -> Tensor:
    return torch.rand(shape or (128, 256)) * 0.8 + 0.1


def _elementwise() -> list[Case]:
    names = """abs acos acosh asin asinh atan atanh ceil celu cos cosh deg2rad elu erf erfc erfinv exp exp2 expm1 floor
        gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish neg
        reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin sinc sinh softplus softshrink sqrt square tan
        tanh trunc"""
    two = "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor maximum.default max.other logaddexp.default"
    return [*(case(f"aten.{name}.default", wide()) for name in names.split()),
            *(case(f"aten.{name}", wide(), other) for name in two.split() for other in (wide(), wide(256))),
            case("aten.clamp.default", wide(), 0.2, 0.5), case("aten.clamp.default", wide(), 0.2),
            case("aten.clamp_min.default", wide(), 0.2), case("aten.addcmul.default", wide(), wide(), wide()),
            case("aten.pow.Tensor_Scalar", wide(), 3.0), case("aten.pow.Scalar", 2.0, wide()),
            case("aten.pow.Tensor_Tensor", wide(), wide()), case("aten.prelu.default", wide(), wide(256)),
            case("aten.nan_to_num.default", wide()), case("aten.glu.default", wide(), 1)]


def _reduced() -> list[Case]:
    losses = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
    rows = torch.arange(128)
    return [*(case(f"aten.{name}.default", wide(), wide(), reduction=how) for name in losses.split() for how in (1, 2)),
            case("aten.poisson_nll_loss.default", wide(), wide(), True, False, 1e-8, 1),
            case("aten.cosine_similarity.default", wide(), wide(), 1),
            case("aten.cross_entropy_loss.default", wide(), wide().softmax(-1)),
            case("aten.var.correction", wide(), [1]), case("aten.amax.default", wide(), [1]),
            case("aten.logsumexp.default", wide(), [1]), case("aten.linalg_vector_norm.default", wide(), 2.0, [1]),
            case("aten.max.default", wide()), case("aten.cumsum.default", wide(), 0),
            case("aten.index_select.default", wide(), 0, rows), case("aten.index.Tensor", wide(), [rows]),
            case("aten.gather.default", wide(), 1, torch.randint(256, (128, 256))),
            case("aten.rms_norm.default", wide(), [256], wide(256)), case("aten.rms_norm.default", wide(), [256]),
            case("aten.layer_norm.default", wide(), [256], wide(256), wide(256)),
            case("aten.upsample_nearest2d.vec", wide(4, 8, 16, 16), None, [2.0, 2.0]),
            case("aten.adaptive_avg_pool2d.default", wide(4, 8, 16, 16), [1, 1])]


def _products() -> list[Case]:
    def head(*shape: int) -> Tensor:
        return wide(*(shape or (2, 4, 64, 32)))

    return [case("aten.matmul.default", wide(64, 64), wide(4, 64, 64)),
            case("aten.baddbmm.default", wide(4, 64, 64), wide(4, 64, 64), wide(4, 64, 64)),
            case("aten.einsum.default", "bi,ijk,bj->bk", [wide(64, 32), wide(32, 32, 32), wide(64, 32)]),
            case("aten.einsum.default", "nd,edf->enf", [wide(128, 64), wide(4, 64, 64)]),
            case("aten.einsum.default", "bhts,bshd->bthd", [wide(2, 4, 32, 32), wide(2, 32, 4, 32)]),
            case("aten.scaled_dot_product_attention.default", head(), head(), head(), None, 0.0, True),
            case("aten.scaled_dot_product_attention.default", head(), head(), head(), wide(4, 64, 64)),
            *(case("aten.scaled_dot_product_attention.default", *(wide(*shape).bfloat16() for shape in (
                (2, 4, rows, 32), (2, 4, 64, 32), (2, 4, 64, 32), (4, rows, 64)))) for rows in (64, 256)),
            case("autoddl.experts", wide(256, 64), routed(256, 8), wide(256, 2), wide(8, 96, 64), wide(8, 64, 48)),
            case("autoddl.experts", wide(256, 64), routed(256, 8), wide(256, 2), wide(8, 384, 64), wide(8, 64, 192)),
            case("autoddl.experts", wide(256, 64), routed(256, 4), wide(256, 2), wide(4, 64, 96), wide(4, 48, 64),
                 wide(4, 96), wide(4, 64), gate=OF_GPT_OSS, paired=True, transposed=True),
            case("autoddl.grouped_mm", wide(256, 64), wide(8, 64, 96), torch.arange(32, 257, 32)),
            case("autoddl.dropout", wide(), 0.1, 0), case("autoddl.attention", head(), head(), head(), None, 0.1, True)]


def _images() -> list[Case]:
    image, rows, bags = wide(4, 8, 16, 16), wide(64, 64), torch.randint(64, (128, 8))
    places = (torch.arange(256).view(16, 16) * 4).expand(4, 8, 16, 16).contiguous()
    layer = [wide(128, 32), wide(128, 32), wide(128), wide(128)]
    return [case("aten.upsample_bilinear2d.vec", image, None, False, [2.0, 2.0]),
            case("aten.upsample_bicubic2d.vec", image, None, False, [2.0, 2.0]),
            case("aten.im2col.default", image, [3, 3], [1, 1], [1, 1], [1, 1]),
            case("aten.col2im.default", wide(4, 72, 256), [16, 16], [3, 3], [1, 1], [1, 1], [1, 1]),
            case("aten.pixel_shuffle.default", image, 2), case("aten.pixel_unshuffle.default", image, 2),
            case("aten.instance_norm.default", image, wide(8), wide(8), None, None, True, 0.1, 1e-5, False),
            case("aten.grid_sampler.default", image, wide(4, 16, 16, 2), 0, 0, False),
            case("aten.affine_grid_generator.default", wide(4, 2, 3), [4, 3, 32, 32], False),
            case("aten.max_unpool2d.default", image, places, [32, 32]),
            case("aten.adaptive_max_pool2d.default", image, [8, 8]),
            case("aten.reflection_pad2d.default", image, [1, 1, 1, 1]),
            case("aten.cdist.default", wide(4, 64, 32), wide(4, 64, 32)), case("aten._weight_norm.default", rows,
                                                                               wide(64, 1)),
            case("aten.bilinear.default", wide(64, 32), wide(64, 32), wide(32, 32, 32), wide(32)),
            *(case("autoddl.embedding_bag", rows, bags, None, mode) for mode in (0, 1, 2)),
            case("aten.lstm.input", wide(16, 8, 32), [wide(1, 8, 32), wide(1, 8, 32)], layer, True, 1, 0.0,
                 True, False, False),
            case("aten.conv_transpose3d.input", wide(2, 8, 8, 8, 8), wide(8, 8, 2, 2, 2), wide(8), [2, 2, 2])]


@pytest.mark.parametrize("one", [*_elementwise(), *_reduced(), *_products(), *_images()], ids=str)
def test_what_an_operator_holds_is_what_it_allocates(one: Case) -> None:
    needs = tuple(k for k in range(len(one.values)) if one.differentiable(k))
    size = max(t.nbytes for t in (*one.inputs, *one.outputs))
    assert foreseen(one, needs) == pytest.approx(measured(one, needs), abs=NEAR * size)


@pytest.mark.parametrize(("dtype", "heads", "on_cpu", "kept"), [
    (torch.float32, 4, False, False), (torch.float32, 2, False, True), (torch.bfloat16, 2, False, False),
    (torch.float64, 4, False, True), (torch.float32, 2, True, False)])
def test_a_gpu_writes_attention_out_where_it_has_no_kernel(dtype: torch.dtype, heads: int, on_cpu: bool, kept: bool
                                                           ) -> None:
    q, k = (torch.empty(2, n, 64, 8, dtype=dtype, device="meta") for n in (4, heads))
    one = case("aten.scaled_dot_product_attention.default", q, k, k, enable_gqa=heads < 4)
    reads = tuple(Value(i, t.shape, contiguous(t.shape), t.itemsize) for i, t in enumerate(one.inputs))
    call = LocalOp(one.op, reads, ((2, 4, 64, 8),), (q.itemsize,), (0, 1, 2), on_cpu=on_cpu)
    assert (footprint_of(call).beside >= 2 * 4 * 64 * 64 * q.itemsize) == kept
