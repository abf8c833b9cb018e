"""What Megatron-Core does on the device beside the operators where experts have biases and clamp their gates.

A rank has n rows sent to its e experts and t tokens of its own, rows of width w, between the products of width h; two
bytes a value. Kernels * values, counted from the operators' reads and writes (a mask of one byte is half a value):

    clamp      forward   gate; up (2 n h each); put together (4 n h)                                    3:  8 n h
               backward  two masks, their product, choice; mask, choice; zeros; together                9: 15 n h
    bias       forward   bias * probability, sum, expert by expert; put together                   2 e + 1:  6 n w
               backward  bias's and probability's gradient: product and sum each; together twice   4 e + 2:  8 n w
    o's bias   forward   by itself                                                                     1:  2 t w
               backward  its gradient                                                                  1:  1 t w
    gradients  of 2 e + 2 biases are added to those of other microbatches one by one           2 e + 2:  3 e (2 h + w)
    again      recomputation: clamp, activation (3 n h), copy into the old place (2 n h)               5: 13 n h
               of the second norm, likewise                                                            2:  4 t w

Sources, all as of 2025-11 to 2026-04. Megatron-Core: transformer/moe/experts.py (TEGroupedMLP._apply_bias: split, a
product and a sum per expert, cat; linear_fc1 has its bias in the product, linear_fc2 returns it); fusions/
fused_bias_geglu.py (weighted_bias_quick_geglu_impl: chunk, two clamps and a cat outside of the fused function);
fusions/fused_bias_dropout.py (x + bias where bias_dropout_fusion is off, as models/gpt_oss/gpt_oss_provider.py of
Megatron-Bridge has it); distributed/distributed_data_parallel.py (main_grad.add_ for what no product adds up);
tensor_parallel/random.py (CheckpointWithoutOutput: what is computed again is copied into the storage that was
dropped); transformer/transformer_layer.py (of both norms the first is part of a product). Transformer Engine:
pytorch/module/grouped_linear.py (biases of fc1 and their gradients in the grouped products). PyTorch: the backward of
clamp, as a run of it dispatches.

The activation makes its offset a tensor on the device (torch.tensor in weighted_bias_quick_geglu_impl), a copy from
pageable memory, for which PyTorch waits until the device has done all that was started (aten/src/ATen/native/cuda/
Copy.cu: memcpy_and_sync). From one wait to the next the host is not ahead at the start, and the device has done all at
the end: kernels in a row i last, with seconds h_i of the host and d_i of the device,

    max over k of  h_1 + ... + h_k + d_k + ... + d_last

of which three are taken: k at the end, at the start, and where the tokens are put in order to be sent, behind
attention, of which the host has much and the device little. Recomputation waits once more, in backward, where the
device has more to do than the host: that is not priced. The dispatcher of every mixture waits for the tokens' counts
(transformer/moe/token_dispatcher.py: _maybe_dtoh_and_synchronize), but behind attention, not before it: by the same
formula that costs next to nothing.
"""

from collections.abc import Iterable
from math import prod

from autoddl.core.layout import Mesh
from autoddl.cost_models import elementwise_seconds
from autoddl.cost_models.machine import Device
from autoddl.validation.layers import Shape

__all__ = ["add_biased", "add_repeated"]

Kernels = tuple[int, float]
"""So many kernels, and the values that all of them move."""


def _seconds(device: Device, kernels: Iterable[Kernels]) -> float:
    """Equally large kernels of elementwise operators, each with its launch."""
    return sum(count * elementwise_seconds(device, 2.0 * values / count) for count, values in kernels)


def _rows(shape: Shape, mesh: Mesh) -> tuple[float, float]:
    """Rows sent to a rank's experts, and its own tokens."""
    own = shape.batch * shape.length / prod(mesh.sizes)
    return own * shape.top, own


def _local(shape: Shape, mesh: Mesh, experts: str) -> int:
    """Experts of a rank; `experts` names the axes that cut them besides ep."""
    cut = prod(size for name, size in zip(mesh.names, mesh.sizes, strict=True) if name in ("ep", *experts.split()))
    return max(1, shape.experts // cut)


def add_biased(total: dict[str, float], shape: Shape, mesh: Mesh, experts: str, device: Device) -> None:
    """Clamps and biases of a layer, and what the host starts for them."""
    (n, t), e, w, h = _rows(shape, mesh), _local(shape, mesh, experts), shape.width, shape.hidden
    there: tuple[Kernels, ...] = ((3, 8 * n * h), (2 * e + 1, 6 * n * w), (1, 2 * t * w))
    back: tuple[Kernels, ...] = ((9, 15 * n * h), (4 * e + 2, 8 * n * w), (1, t * w), (2 * e + 2, 3 * e * (2 * h + w)))
    for kernels, which, started in ((there, "forward", "begun"), (back, "backward", "backward_begun")):
        total[which] += _seconds(device, kernels)
        total[started] += device.launch * sum(count for count, _ in kernels)
    order: Kernels = (2, (3 + 1 / shape.top) * n * w)  # 1 written of 1/top read, then by local expert 2
    total["awaited"] += _seconds(device, (order, there[0])) - device.launch * there[0][0]


def add_repeated(total: dict[str, float], shape: Shape, mesh: Mesh, clamped: bool, device: Device) -> None:
    """What recomputation of the second norm and of the experts' activation costs, and the bytes that it saves."""
    (n, t), w, h = _rows(shape, mesh), shape.width, shape.hidden
    acted: Kernels = (5, 13 * n * h) if clamped else (2, 5 * n * h)
    total["modules"] += _seconds(device, (acted, (2, 4 * t * w)))
    total["modules_saved"] += 2.0 * (n * h + t * w)
