"""The operators that are timed, where torch has no function that takes tensors alone."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["batch_normalise", "causal", "convolution", "gather", "index", "mean", "normalise", "pool"]


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def batch_normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    found: tuple[Tensor, ...] = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, variance, True, 0.1, 1e-5)
    return found[0]


def gather(weight: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def index(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)
