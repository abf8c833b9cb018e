"""Lists the kernels that are timed on a device: one operator of every kind of work, at the points of a grid of sizes.

    products        m, n, k      of `sides` and `widths`           linear, whose n is a vocabulary; bmm of BATCH pairs
    convolutions    (pixels, 9 * channels in, channels out)        3 x 3, of one padding
    attention       queries and head size                          causal and full, HEADS heads, or as many as fill
                                                                   a GPU
    memory          bytes                                          one operator of each of `kernel_kinds`, rows of ROW;
                                                                   rows of BLOCK looked up

The kernels of an operator, their names and their work are those of the planner itself (`kernels`). So a point of a
curve means the same as in a price.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.calibrate import kernel_cases as operators
from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample
from autoddl.core.graph import Graph
from autoddl.cost_models import Kernel
from autoddl.operators.kernels.reducing import batch_norm_of_module
from autoddl.operators.work import base, work
from autoddl.pricing.kernel_prices import kernel_of

__all__ = [
    "LARGE",
    "SMALL",
    "USUAL",
    "Case",
    "Known",
    "Scale",
    "batch_normalise",
    "cases",
    "causal",
    "convolution",
    "gather",
    "index",
    "kernels",
    "layer_normalise",
    "loss",
    "mean",
    "pool",
]

BATCH, HEADS, ROW, BLOCK, IMAGES, PIXELS = 16, 8, 256, 2**14, 8, 64


Known = dict[tuple[Callable[..., Tensor], torch.dtype], Graph]


@dataclass(frozen=True, slots=True)
class Scale:
    """The grids of sizes at which kernels are timed."""

    sides: tuple[int, ...]
    """m and k of products."""
    widths: tuple[int, ...]
    """n of products."""
    batched: tuple[int, ...]
    """m, n and k of batched products."""
    convolution: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Pixels along a side, channels in and channels out of convolutions."""
    attention: tuple[tuple[int, ...], tuple[int, ...]]
    """Queries and head sizes of attention."""
    elements: tuple[int, ...]
    """Elements of kernels that are bound by memory."""
    row: int = ROW
    """Elements of a row that is normalised or added up."""
    classes: int = ROW
    """Elements of a row of logits, at most."""
    channels: int = PIXELS
    """Channels of images that are normalised: each is a block of a GPU's kernel."""
    rows: int = 0
    """Queries of all heads together at least: each block of queries occupies one multiprocessor of a GPU."""


USUAL = Scale((1, 16, 64, 256, 1024), (1, 16, 64, 256, 1024, 4096), (1, 16, 64, 256),
              ((2, 8, 32), (3, 16, 64, 256), (16, 64, 256)), ((16, 64, 256, 1024), (16, 32, 64, 128)),
              (2**10, 2**13, 2**16, 2**19, 2**22, 2**23))
LARGE = Scale((64, 512, 2048, 8192), (64, 512, 2048, 8192, 2**15), (64, 512, 2048),
              ((7, 28, 112, 224), (3, 64, 256, 512), (64, 256, 512)), ((64, 512, 2048, 8192), (64, 128)),
              (2**12, 2**16, 2**20, 2**24, 2**28), row=2**11, classes=2**15, channels=256, rows=2**17)
"""For a GPU, which takes as long for small kernels as for none."""
SMALL = Scale((32,), (32,), (16,), ((4,), (3,), (8,)), ((16,), (8,)), (2**10,))


@dataclass(frozen=True, slots=True)
class Case:
    """An operator with its inputs: `op` on tensors of `shapes`, then on a tensor of shape `indices` of integers below
    `below`. In a graph the operator is called `target`."""

    target: str
    op: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    indices: tuple[int, ...] | None = None
    below: int = 1

    def tensors(self, noise: Tensor) -> list[Tensor]:
        """Returns new inputs that require gradients, with the values of `noise`; then the indices."""
        made = [noise[: prod(shape)].clone().view(shape).requires_grad_() for shape in self.shapes]
        return made + ([] if self.indices is None else [torch.randint(self.below, self.indices, device=noise.device)])


class _Alone(nn.Module):
    """A case as a model: its loss is the sum."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.op = case.op
        with torch.device("meta"):
            self.inputs = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in case.shapes)

    def forward(self, *indices: Tensor) -> Tensor:
        return self.op(*self.inputs, *indices).sum()


def kernels(case: Case, dtype: torch.dtype, known: Known) -> tuple[Kernel, tuple[Kernel, ...]]:
    """Returns the kernels that the planner prices, forward and backward.

    `known` collects captured graphs: an operator that reads only the case's tensors has one graph for all sizes."""
    if (graph := known.get((case.op, dtype))) is None:
        sample = () if case.indices is None else (torch.zeros(case.indices, dtype=torch.int64, device="meta"),)
        graph = capture(_Alone(case, dtype), Sample(sample)).graph
    op = next(op for op in graph.ops if base(op) == case.target)
    shapes = [tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
    if len(op.inputs) == len(case.shapes) and len(op.outputs) == 1:
        known[case.op, dtype] = graph
        made = case.op(*(torch.empty(shape, dtype=dtype, device="meta") for shape in case.shapes))
        shapes = [case.shapes, (tuple(made.shape),)]
    forward, backward = work(op, graph, shapes[0], shapes[1], graph.differentiable())
    name = str(dtype).removeprefix("torch.")
    return kernel_of(forward[0], name), tuple(kernel_of(one, name) for one in backward)


def cases(scale: Scale) -> Iterator[Case]:
    """Yields all cases of one dtype."""
    for m, n, k in product(scale.sides, scale.widths, scale.sides):
        yield Case("aten.linear", F.linear, ((m, k), (n, k)))
    for m, n, k in product(scale.batched, repeat=3):
        yield Case("aten.bmm", torch.bmm, ((BATCH, m, k), (BATCH, k, n)))
    for side, before, after in product(*scale.convolution):
        yield Case("aten.conv2d", operators.convolution, ((IMAGES, before, side, side), (after, before, 3, 3)))
    for queries, size in product(*scale.attention):
        for op in (operators.causal, F.scaled_dot_product_attention):
            shape = (1, max(HEADS, scale.rows // queries), queries, size)
            yield Case("aten.scaled_dot_product_attention", op, (shape,) * 3)
    for elements in scale.elements:
        yield from _memory(elements, scale)


def _memory(elements: int, scale: Scale) -> Iterator[Case]:
    """One operator of each kind on rows, on logits and images as large, and on a table that is gathered from."""
    row, classes, wide = scale.row, min(scale.classes, elements), ((elements // scale.row, scale.row),)
    image, channels = _image(elements, PIXELS), (scale.channels,)
    yield Case("aten.add", torch.add, wide * 2)
    yield Case("aten.mul", torch.mul, wide * 2)
    yield Case("aten.neg", torch.neg, wide)
    yield Case("aten.gelu", F.gelu, wide)
    yield Case("aten.mean", operators.mean, wide)
    yield Case("aten.layer_norm", operators.layer_normalise, (*wide, (row,), (row,)))
    yield Case("aten._native_batch_norm_legit_functional", operators.batch_normalise,
               (_image(elements, scale.channels), channels, channels))
    for block in (ROW, BLOCK):
        if found := elements // block:
            table = max(found // 4, 2)
            yield Case("aten.embedding", operators.gather, ((table, block),), (found,), table)
            yield Case("aten.index", operators.index, ((table, block),), (found,), table)
    yield Case("aten.max_pool2d", operators.pool, (image,))
    yield Case("autoddl.token_loss", operators.loss, ((elements // classes, classes),), (elements // classes,), classes)


def _image(elements: int, channels: int) -> tuple[int, int, int, int]:
    """The shape of square images of some channels, of about so many elements."""
    side = max(2, int((elements / channels / IMAGES) ** 0.5))
    return IMAGES, channels, side, side


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Returns a 2-D convolution with a padding of one pixel."""
    return F.conv2d(x, weight, padding=1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def mean(x: Tensor) -> Tensor:
    """Returns the mean of every row."""
    return x.mean(-1, keepdim=True)


def layer_normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the layer norm of every row."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def batch_normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the training batch norm, as a program runs it."""
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    if x.is_cuda:
        result = batch_norm_of_module(x, weight, bias, mean, variance, True, 0.1, 1e-5)[0]
        assert result is not None
        return result
    found: tuple[Tensor, ...] = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, variance, True, 0.1, 1e-5)
    return found[0]


def gather(weight: Tensor, indices: Tensor) -> Tensor:
    """Returns rows of a table, as an embedding."""
    return F.embedding(indices, weight)


def index(x: Tensor, indices: Tensor) -> Tensor:
    """Returns rows of a tensor, by indexing."""
    return x[indices]


def loss(x: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy, which capture writes as a sum over a number."""
    return F.cross_entropy(x, labels)


def pool(x: Tensor) -> Tensor:
    """Returns the maximum of every window of 2 x 2 pixels."""
    return F.max_pool2d(x, 2)
