"""The table of operators: one row per family, from which every list of operators is derived.

    rule        the file of `rules` that says its layouts; `-`: it has none, and runs replicated
    footprint   the file of `footprints` that says its bytes; `-`: a view, or one whose inputs are taken to be kept
    curve       the measured curve that its kernels follow (`kernel_kinds`); products, convolutions and attention have
                curves of their own (`work`)
    reads       what its backward reads:
                    inputs, output, factors (each factor for the other's gradient), all (inputs and output), nothing
                    divisor   b of a / b, and a if b has a gradient          indices   where the values went
                    weight    all of `lerp` by a tensor                      mask      which elements were dropped
                    place     the input, unless the index is an output       shape     of the input its shape alone
                    source    all but what is added to                   matrices  inputs of two dims or more
    flags       view      it has no memory of its own: its output lies in its input's
                cut       a view whose gradient is put together from the gradients of the pieces, which moves them
                values    whole numbers pass through it unchanged
                stops     no gradient reaches what it reads
                distance  a loss whose mean over a piece is multiplied by the piece's share
                convolution
                free      it has no kernel: what it waits for is priced by the pipeline that it is in

Names are those of torch's operators without their overloads: `add` is `aten.add` with all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["FACTORS", "FAMILIES", "Family", "family_of", "flagged", "reading"]

FACTORS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "aten.linear": ("input", "weight"), "aten.mm": ("self", "mat2"), "aten.bmm": ("self", "mat2"),
    "aten.matmul": ("self", "other"), "aten.addmm": ("mat1", "mat2"), "aten.baddbmm": ("batch1", "batch2"),
    "autoddl.grouped_mm": ("rows", "weight"), "aten.mv": ("self", "vec"), "aten.dot": ("self", "tensor")})
"""The slots of the two factors of a product."""

_TABLE = """
rule         footprint    curve           reads    flags                names
shape        -            copy            inputs   -                    adjoint eye linspace moveaxis ones ravel
                                                                        scalar_tensor swapdims tril_indices
                                                                        triu_indices zeros
shape        -            copy            inputs   stops                new_full new_ones new_zeros
shape        -            copy            inputs   values               reshape_as
shape        -            copy            nothing  view                 _unsafe_view mT movedim numpy_T swapaxes t
                                                                        unflatten
shape        -            copy            nothing  view,values          flatten permute reshape squeeze transpose
                                                                        unsqueeze view view_as
shape        table        copy            nothing  -                    arange full
shape        nn           copy            nothing  -                    autoddl.draw
cut          -            copy            inputs   -                    concat concatenate tensor_split tile
                                                                        unsafe_chunk unsafe_split
cut          -            copy            nothing  view                 diagonal unfold
cut          -            copy            nothing  view,cut             chunk narrow split split_with_sizes unbind
cut          -            copy            nothing  view,cut,values      select slice
cut          table        copy            indices  -                    repeat_interleave
cut          table        copy            inputs   -                    pad
cut          table        copy            nothing  -                    flip repeat roll stack tril triu
cut          table        copy            nothing  values               cat constant_pad_nd slice_scatter
index        -            copy            inputs   -                    bucketize index_copy one_hot scatter_reduce
                                                                        searchsorted
index        table        copy            nothing  values               select_scatter
index        table        gather          nothing  -                    index_select
index        table        gather          source   -                    index_add
index        table        index           indices  -                    index_put scatter scatter_add
index        table        index           inputs   -                    take_along_dim
index        table        index           nothing  -                    index
index        table        index           shape    -                    gather
elementwise  -            add             inputs   -                    addcdiv
elementwise  -            exponential     inputs   -                    autoddl.variate
elementwise  -            copy            inputs   -                    __and__ __or__ __xor__ arctan2 atan2
                                                                        bitwise_and bitwise_not bitwise_or bitwise_xor
                                                                        broadcast_tensors broadcast_to contiguous
                                                                        copysign divide eq fill floor_divide frac ge
                                                                        greater greater_equal gt heaviside hypot
                                                                        isclose isfinite isinf isnan isneginf isposinf
                                                                        le less less_equal lift_fresh lift_fresh_copy
                                                                        logaddexp2 logical_and logical_not logical_or
                                                                        logical_xor lt multiply ne negative not_equal
                                                                        sgn signbit subtract to true_divide type_as
elementwise  -            copy            inputs   values               expand_as
elementwise  -            copy            inputs   -                    angle polar
elementwise  -            copy            nothing  -                    _conj complex conj conj_physical imag real
                                                                        resolve_conj resolve_neg
elementwise  -            copy            nothing  view,values          alias expand
elementwise  -            copy            nothing  view,values,stops    detach
elementwise  -            multiply        inputs   -                    fmod remainder
elementwise  elementwise  add             inputs   -                    addcmul
elementwise  elementwise  add             nothing  -                    add masked_fill rsub sub
elementwise  elementwise  add             nothing  values               where
elementwise  elementwise  add             weight   -                    lerp
elementwise  elementwise  copy            inputs   -                    abs acos acosh asin asinh atan atanh ceil celu
                                                                        clamp clamp_max clamp_min clip cosh deg2rad
                                                                        digamma erfc erfinv fix floor fmax fmin
                                                                        hardshrink hardsigmoid hardtanh leaky_relu
                                                                        lgamma log10 log_sigmoid logaddexp logit
                                                                        nan_to_num prelu rad2deg relu6 round sign sinc
                                                                        sinh softshrink special_expit square threshold
                                                                        trunc xlogy
elementwise  elementwise  copy            nothing  -                    neg
elementwise  elementwise  copy            output   -                    reciprocal relu tan
elementwise  elementwise  exponential     inputs   -                    cos elu erf gelu hardswish log log1p log2 mish
                                                                        pow selu silu sin softplus
elementwise  elementwise  exponential     output   -                    exp exp2 expm1 rsqrt sigmoid sqrt tanh
elementwise  elementwise  multiply        divisor  -                    div
elementwise  elementwise  multiply        factors  -                    mul
elementwise  elementwise  multiply        inputs   -                    maximum minimum
elementwise  table        copy            inputs   -                    positive
elementwise  table        copy            nothing  -                    copy
elementwise  table        copy            nothing  values               _to_copy clone
elementwise  table        copy            nothing  stops                full_like ones_like zeros_like
elementwise+reduce table        reduce          place    -                    max min
reduce       -            copy            inputs   -                    aminmax argsort count_nonzero cummax cummin
                                                                        cumprod diff kthvalue logcumsumexp median mode
                                                                        nanmedian
reduce       -            reduce          inputs   -                    all any argmax argmin
reduce       -            reduce          output   -                    linalg_cholesky
reduce       table        reduce          inputs   -                    _weight_norm amax amin cdist linalg_vector_norm
                                                                        norm pairwise_distance prod std var
reduce       loss         copy            inputs   -                    cosine_similarity
reduce       table        copy            inputs   -                    glu std_mean var_mean
reduce       table        normalise       inputs   -                    logsumexp
reduce       table        reduce          nothing  -                    cumsum mean sort sum topk
matmul       einsum       multiply        factors  -                    einsum
matmul       table        copy            inputs   -                    bilinear
matmul       nn           copy            factors  -                    addmm baddbmm bmm dot linear matmul mm mv
                                                                        autoddl.grouped_mm
matmul       nn           copy            inputs   convolution          conv1d conv2d conv3d conv_transpose1d
                                                                        conv_transpose2d conv_transpose3d convolution
experts      experts      copy            inputs   -                    autoddl.experts
nn           -            copy            inputs   -                    _adaptive_avg_pool2d
                                                                        _native_batch_norm_legit_no_training
                                                                        adaptive_avg_pool1d adaptive_avg_pool3d
nn           -            normalise       inputs   -                    _safe_softmax
nn           attention    copy            all      -                    scaled_dot_product_attention autoddl.attention
flexible     attention    copy            all      -                    autoddl.flex_attention
nn           elementwise  normalise       output   -                    _log_softmax _softmax log_softmax softmax
nn           nn           batch-normalise inputs   -                    _native_batch_norm_legit_functional
nn           nn           copy            mask     -                    autoddl.dropout
nn           -            gather          inputs   -                    embedding_bag
nn           nn           gather          nothing  -                    autoddl.embedding_bag embedding
nn           nn           normalise       inputs   -                    group_norm layer_norm native_layer_norm
                                                                        rms_norm
nn           table        copy            shape    -                    adaptive_avg_pool2d
nn           table        pool            inputs   -                    avg_pool1d avg_pool3d max_pool1d max_pool2d
                                                                        max_pool2d_with_indices max_pool3d
nn           table        pool            shape    -                    avg_pool2d
loss         -            loss            inputs   -                    nll_loss nll_loss_nd autoddl.ctc_loss
loss         loss         copy            inputs   distance             binary_cross_entropy
                                                                        binary_cross_entropy_with_logits huber_loss
                                                                        kl_div l1_loss mse_loss poisson_nll_loss
                                                                        smooth_l1_loss soft_margin_loss
loss         -            copy            inputs   distance             cosine_embedding_loss hinge_embedding_loss
                                                                        margin_ranking_loss triplet_margin_loss
loss         loss         loss            inputs   -                    cross_entropy_loss
loss         nn           loss            inputs   -                    autoddl.token_loss
loss         table        copy            inputs   -                    autoddl.token_weight
loss         table        copy            nothing  values               autoddl.checked
-            -            batch-normalise inputs   -                    _native_batch_norm_legit
-            -            copy            nothing  view,values          autoddl.hub
-            table        copy            nothing  free                 autoddl.receive autoddl.send
-            -            exponential     inputs   -                    logsigmoid
-            -            loss            inputs   -                    nll_loss2d
-            nn           batch-normalise inputs   -                    batch_norm native_batch_norm
-            nn           copy            inputs   -                    native_group_norm
images       table        gather          inputs   -                    grid_sampler
images       nn           normalise       matrices -                    instance_norm
images       table        copy            nothing  -                    _upsample_bicubic2d_aa _upsample_bilinear2d_aa
                                                                        _upsample_nearest_exact1d
                                                                        _upsample_nearest_exact2d
                                                                        _upsample_nearest_exact3d affine_grid_generator
                                                                        channel_shuffle col2im im2col meshgrid
                                                                        pixel_shuffle pixel_unshuffle
                                                                        upsample_bicubic2d upsample_bilinear2d
                                                                        upsample_linear1d upsample_nearest1d
                                                                        upsample_nearest2d upsample_nearest3d
                                                                        upsample_trilinear3d
images       table        copy            shape    -                    reflection_pad1d reflection_pad2d
                                                                        reflection_pad3d replication_pad1d
                                                                        replication_pad2d replication_pad3d
images       table        index           indices  -                    max_unpool2d max_unpool3d
images       table        pool            inputs   -                    adaptive_max_pool1d adaptive_max_pool2d
                                                                        adaptive_max_pool3d max_pool1d_with_indices
                                                                        max_pool3d_with_indices
spectra      -            copy            nothing  -                    _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2
                                                                        fft_fftn fft_fftshift fft_hfft fft_hfft2
                                                                        fft_hfftn fft_ifft fft_ifft2 fft_ifftn
                                                                        fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn
                                                                        fft_irfft fft_irfft2 fft_irfftn fft_rfft
                                                                        fft_rfft2 fft_rfftn stft istft view_as_complex
                                                                        view_as_real
recurrent    table        copy            inputs   -                    lstm
recurrent    table        copy            matrices -                    gru gru_cell lstm_cell rnn_relu rnn_relu_cell
                                                                        rnn_tanh rnn_tanh_cell
"""


@dataclass(frozen=True, slots=True)
class Family:
    """Operators that are alike in all that the table says."""

    rule: str
    """File of `rules`, or several with `+`; empty: no rule."""
    footprint: str
    """File of `footprints`; empty: none."""
    curve: str = "copy"
    """Name of the measured curve of its kernels."""
    reads: str = "inputs"
    """What its backward reads, in the words above."""
    flags: frozenset[str] = frozenset()
    """The flags above that hold."""
    names: tuple[str, ...] = ()
    """Operators without their overloads, like `aten.add`."""


def _rows() -> Iterator[Family]:
    """The rows of the table; a line that begins with a space goes on with the names of the line before."""
    lines: list[str] = []
    for line in _TABLE.strip().splitlines()[1:]:
        if line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    for line in lines:
        rule, footprint, curve, reads, flags, *names = line.split()
        yield Family(rule.strip("-"), footprint.strip("-"), curve.replace("-", " "), reads,
                     frozenset(flags.strip("-").split(",")) - {""},
                     tuple(name if "." in name else f"aten.{name}" for name in names))


FAMILIES: tuple[Family, ...] = tuple(_rows())
_OF: Mapping[str, Family] = MappingProxyType({name: family for family in FAMILIES for name in family.names})
_UNKNOWN = Family("", "")


def family_of(name: str) -> Family:
    """The family of an operator, named without its overload; one that the table does not know copies its inputs and
    keeps them for backward."""
    return _OF.get(name, _UNKNOWN)


def flagged(flag: str) -> frozenset[str]:
    """The operators with a flag."""
    return frozenset(name for family in FAMILIES if flag in family.flags for name in family.names)


def reading(what: str) -> frozenset[str]:
    """The operators whose backward reads just that."""
    return frozenset(name for family in FAMILIES if family.reads == what for name in family.names)
