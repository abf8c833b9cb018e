"""Calls of operators on images and sequences, and of distances, on which their rules are tested: 5 and 7 are uneven."""

import torch
from op_cases import f, ints, positive
from torch import Tensor

from autoddl.operators.trials.cases import Case, case

__all__ = ["CASES"]

UPSAMPLE = [
    *(case(f"aten.{name}{len(shape)}d.vec", f(*batch, *shape), None, [2.0] * len(shape))
      for name in ("upsample_nearest", "_upsample_nearest_exact") for shape in ((5,), (4, 3), (2, 3, 2))
      for batch in ((5, 6), (4, 7))),
    *(case(f"aten.upsample_{name}.vec", f(*batch, *shape), size, align, None)
      for name, shape, size in (("linear1d", (5,), [9]), ("bilinear2d", (4, 3), [6, 5]),
                                ("trilinear3d", (2, 3, 2), [3, 4, 4]), ("bicubic2d", (4, 3), [6, 5]))
      for batch, align in (((5, 6), False), ((4, 7), True))),
    *(case(f"aten._upsample_{name}2d_aa.vec", f(*batch, 6, 5), [4, 3], False, None)
      for name in ("bilinear", "bicubic") for batch in ((5, 6), (4, 7))),
]

PADS = [case(f"aten.{name}_pad{k}d.default", f(*batch, *((4,) * k)), [1, 2] * k)
        for name in ("reflection", "replication") for k in (1, 2, 3) for batch in ((5, 6), (7,))]

WINDOWS = [
    case("aten.im2col.default", f(5, 6, 4, 5), [2, 3], [1, 1], [1, 0], [1, 1]),
    case("aten.im2col.default", f(6, 5, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    case("aten.col2im.default", f(5, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    case("aten.col2im.default", f(20, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    case("aten.pixel_shuffle.default", f(5, 24, 4, 3), 2), case("aten.pixel_shuffle.default", f(9, 2, 6), 3),
    case("aten.pixel_unshuffle.default", f(5, 6, 4, 8), 2), case("aten.pixel_unshuffle.default", f(2, 3, 6, 6), 3),
    case("aten.channel_shuffle.default", f(5, 6, 4, 3), 2), case("aten.channel_shuffle.default", f(6, 8, 5), 4),
]

POOLS = [
    *(case(f"aten.max_pool{k}d_with_indices.default", f(*batch, *((4,) * k)), [2] * k) for k in (1, 3)
      for batch in ((5, 6), (7,))),
    *(case(f"aten.adaptive_max_pool{k}d.default", f(*batch, *((4,) * k)), [2] * k) for k in (1, 2, 3)
      for batch in ((5, 6), (7,))),
    *(case(f"aten.max_unpool{k}d.default", f(*batch, *((1,) * k)), ints(2**k, *batch, *((1,) * k)), [2] * k, *more)
      for k, more in ((2, ()), (3, ([2] * 3, [0] * 3))) for batch in ((5, 6), (7,))),
]

NORMS = [
    case("aten.instance_norm.default", f(5, 6, 4, 3), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    case("aten.instance_norm.default", f(4, 7, 5), None, None, None, None, True, 0.1, 1e-5, False),
    case("aten.instance_norm.default", f(5, 6, 3), f(6), f(6), f(6), positive(6), False, 0.1, 1e-5, False),
    case("aten._weight_norm.default", f(5, 6), f(5, 1), 0),
    case("aten._weight_norm.default", f(4, 6, 3), f(1, 6, 1), 1),
    case("aten._weight_norm.default", f(4, 6), f(1, 1), -1),
    case("aten.linalg_cholesky.default", f(4, 3, 3) / 9 + torch.eye(3).double()),
    case("aten.linalg_cholesky.default", f(2, 5, 2, 2) / 9 + torch.eye(2).double(), upper=True),
]

GRIDS = [
    case("aten.grid_sampler.default", f(5, 6, 4, 3), f(5, 7, 2, 2), 0, 0, False),
    case("aten.grid_sampler.default", f(2, 3, 3, 4, 3), f(2, 5, 4, 2, 3), 1, 1, True),
    case("aten.affine_grid_generator.default", f(5, 2, 3), [5, 3, 4, 6], False),
    case("aten.affine_grid_generator.default", f(4, 3, 4), [4, 2, 3, 4, 5], True),
    case("aten.meshgrid.default", [f(5), f(6)]), case("aten.meshgrid.default", [f(4), f(5), f(6)]),
    case("aten.meshgrid.indexing", [f(5), f(6)], indexing="xy"), case("aten.meshgrid.indexing", [f(4)], indexing="ij"),
]


def weights(gates: int, inner: int, hidden: int, layers: int = 1) -> list[Tensor]:
    """Two matrices and two biases of each layer."""
    found = []
    for layer in range(layers):
        wide = hidden if layer else inner
        found += [f(gates * hidden, wide), f(gates * hidden, hidden), f(gates * hidden), f(gates * hidden)]
    return found


RECURRENT = [
    case("aten.lstm.input", f(3, 5, 4), [f(2, 5, 3), f(2, 5, 3)], weights(4, 4, 3, 2), True, 2, 0.0, True, False,
         False),
    case("aten.lstm.input", f(6, 3, 4), [f(1, 6, 3), f(1, 6, 3)], weights(4, 4, 3), True, 1, 0.0, False, False, True),
    *(case(f"aten.{name}.input", f(*shape, 4), f(1, 5, 3), weights(gates, 4, 3), True, 1, 0.0, True, False, first)
      for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
      for shape, first in (((3, 5), False), ((5, 3), True))),
    *(case("aten.lstm_cell.default", f(rows, 4), [f(rows, 3), f(rows, 3)], *weights(4, 4, 3)) for rows in (5, 6)),
    *(case(f"aten.{name}_cell.default", f(rows, 4), f(rows, 3), *weights(gates, 4, 3))
      for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)) for rows in (5, 6)),
]

DISTANCES = [
    case("aten.cdist.default", f(5, 6, 4), f(5, 7, 4)), case("aten.cdist.default", f(6, 4), f(5, 4), 1.0),
    case("aten.cdist.default", f(3, 1, 6, 4), f(2, 5, 4)),
    case("aten.cosine_similarity.default", f(5, 6, 4), f(5, 6, 4)),
    case("aten.cosine_similarity.default", f(5, 6), f(1, 6), -1),
    case("aten.pairwise_distance.default", f(5, 6), f(5, 6)),
    case("aten.pairwise_distance.default", f(5, 6, 4), f(6, 4), 2.0, 1e-6, True),
    case("aten.bilinear.default", f(5, 6), f(5, 4), f(7, 6, 4), f(7)),
    case("aten.bilinear.default", f(5, 2, 6), f(5, 2, 4), f(3, 6, 4)),
]

BAGS = [
    *(case("autoddl.embedding_bag", f(7, 6), ints(7, 5, 3), None, mode) for mode in (0, 1, 2)),
    case("autoddl.embedding_bag", f(6, 5), ints(6, 6, 2), f(6, 2)),
    case("aten.embedding_bag.padding_idx", f(7, 6), ints(7, 9), ints(1, 4), False, 0, False, None, False, None),
    case("aten.embedding_bag.padding_idx", f(6, 5), ints(6, 8), ints(1, 3), False, 2, False, None, False, 2),
]

OTHERS = [
    case("aten.conv_transpose3d.input", f(5, 6, 3, 2, 2), f(6, 7, 2, 2, 2), f(7), [2, 2, 2]),
    case("aten.conv_transpose3d.input", f(2, 6, 2, 2, 2), f(6, 3, 2, 2, 2), None, [1] * 3, [0] * 3, [0] * 3, 2),
]

CASES: list[Case] = [*UPSAMPLE, *PADS, *WINDOWS, *POOLS, *NORMS, *GRIDS, *RECURRENT, *DISTANCES, *BAGS, *OTHERS]
