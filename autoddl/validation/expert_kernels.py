"""Counts the kernels that Megatron-Core runs for a mixture of experts, besides the operators of the graph.

A rank has n rows sent to its e experts, and t tokens of its own. Rows have width w, and width h between the products,
with two bytes per value. `bias_kernels` is for experts with biases and clamped gates. Kernels, and the values that they
read and write (a mask of one byte is half a value):

    clamp      forward   gate; up (2 n h each); put together (4 n h)                                    3:  8 n h
               backward  two masks, their product, choice; mask, choice; zeros; together                9: 15 n h
    bias       forward   bias * probability, sum, expert by expert; put together                   2 e + 1:  6 n w
               backward  bias's and probability's gradient: product and sum each; together twice   4 e + 2:  8 n w
    o's bias   forward   by itself                                                                     1:  2 t w
               backward  its gradient                                                                  1:  1 t w
    gradients  of 2 e + 2 biases are added to those of other microbatches one by one           2 e + 2:  3 e (2 h + w)
    again      recomputation: clamp, activation (3 n h), copy into the old place (2 n h)               5: 13 n h
               of the second norm, likewise                                                            2:  4 t w

Sources, all as of 2025-11 to 2026-04:

    Megatron-Core
      transformer/moe/experts.py            TEGroupedMLP._apply_bias: split, a product and a sum per expert, cat;
                                            linear_fc1 has its bias in the product, linear_fc2 returns it
      fusions/fused_bias_geglu.py           weighted_bias_quick_geglu_impl: chunk, two clamps and a cat outside of the
                                            fused function
      fusions/fused_bias_dropout.py         x + bias where bias_dropout_fusion is off, as Megatron-Bridge has it in
                                            models/gpt_oss/gpt_oss_provider.py
      distributed/distributed_data_parallel.py   main_grad.add_ for what no product adds up
      tensor_parallel/random.py             CheckpointWithoutOutput copies what is computed again into the storage that
                                            was dropped
      transformer/transformer_layer.py      the first of both norms is part of a product
    Transformer Engine
      pytorch/module/grouped_linear.py      biases of fc1 and their gradients are in the grouped products
    PyTorch                                 the backward of clamp, as a run of it dispatches

The activation makes its offset a tensor on the device (torch.tensor in weighted_bias_quick_geglu_impl), a copy from
pageable memory. PyTorch waits for such a copy until the device has done all that was started
(aten/src/ATen/native/cuda/Copy.cu: memcpy_and_sync). From one wait to the next the host is not ahead at the start, and
the device has done all at the end. Kernels of a row i ... last take h_i seconds of the host and d_i of the device:

    max over k of  h_1 + ... + h_k + d_k + ... + d_last

Three values of k are priced: the end, the start, and where tokens are put in order to be sent. That place comes behind
attention, of which the host has much and the device little. Recomputation waits once more, in backward, where the
device has more to do than the host: that is not priced. The dispatcher of every mixture waits for the tokens' counts
(transformer/moe/token_dispatcher.py: _maybe_dtoh_and_synchronize), but behind attention, not before it. By the same
formula that costs next to nothing.
"""

from collections.abc import Iterable
from math import prod

from autoddl.core.layout import Mesh
from autoddl.cost_models import elementwise_seconds
from autoddl.cost_models.machine import Device
from autoddl.validation.layers import Shape
from autoddl.validation.part import Part

__all__ = ["bias_kernels", "recompute_kernels", "sorting_kernels"]

Kernels = tuple[int, float]
"""How many kernels, and the values that all of them move."""


def _seconds(device: Device, kernels: Iterable[Kernels]) -> float:
    """Seconds of equally large elementwise kernels, each with its launch."""
    return sum(count * elementwise_seconds(device, 2.0 * values / count) for count, values in kernels)


def _rows(shape: Shape, mesh: Mesh) -> tuple[float, float]:
    """Rows sent to a rank's experts, and its own tokens."""
    own = shape.batch * shape.length / prod(mesh.sizes)
    return own * shape.top_k, own


def _local_experts(shape: Shape, mesh: Mesh, expert_axes: str) -> int:
    """Experts of a rank, which ep and `expert_axes` cut."""
    cut = prod(size for name, size in zip(mesh.names, mesh.sizes, strict=True) if name in ("ep", *expert_axes.split()))
    return max(1, shape.experts // cut)


def sorting_kernels(shape: Shape, mesh: Mesh, device: Device) -> Part:
    """Returns the seconds in which copies of tokens are put in the order of experts, and back.

    In the graph these are views. Megatron-Core moves them before they are sent, and again by local expert
    (moe/token_dispatcher.py: permute, sort_chunks_by_idxs, unpermute): per copy 1 written of 1/top_k read, 2, 2. The
    mixing at the end is in the graph, but with its weights as a kernel of their own. Megatron-Core multiplies these in
    the activation: 2 forward and 3 backward less.
    """
    copies = 2.0 * shape.batch * shape.length * shape.top_k * shape.width / prod(mesh.sizes)
    return Part(forward=elementwise_seconds(device, copies * (3 + 1 / shape.top_k)),
                backward=elementwise_seconds(device, copies * (2 + 1 / shape.top_k)))


def bias_kernels(shape: Shape, mesh: Mesh, expert_axes: str, device: Device) -> Part:
    """Returns the seconds of clamps and biases of a layer: of the device, of the host that starts them, and awaited."""
    (n, t), e, w, h = _rows(shape, mesh), _local_experts(shape, mesh, expert_axes), shape.width, shape.hidden
    forward: tuple[Kernels, ...] = ((3, 8 * n * h), (2 * e + 1, 6 * n * w), (1, 2 * t * w))
    backward: tuple[Kernels, ...] = ((9, 15 * n * h), (4 * e + 2, 8 * n * w), (1, t * w),
                                     (2 * e + 2, 3 * e * (2 * h + w)))
    order: Kernels = (2, (3 + 1 / shape.top_k) * n * w)  # 1 written of 1/top_k read, then by local expert 2
    return Part(forward=_seconds(device, forward), host_forward=device.launch * sum(count for count, _ in forward),
                backward=_seconds(device, backward), host_backward=device.launch * sum(count for count, _ in backward),
                awaited=_seconds(device, (order, forward[0])) - device.launch * forward[0][0])


def recompute_kernels(shape: Shape, mesh: Mesh, clamped: bool, device: Device) -> Part:
    """Returns what recomputation of the second norm and of the experts' activation takes, and the bytes it saves."""
    (n, t), w, h = _rows(shape, mesh), shape.width, shape.hidden
    activation: Kernels = (5, 13 * n * h) if clamped else (2, 5 * n * h)
    return Part(modules=_seconds(device, (activation, (2, 4 * t * w))), modules_saved=2.0 * (n * h + t * w))
