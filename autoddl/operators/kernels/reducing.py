"""Kernels that reduce over mesh axes by themselves, forward and backward written out.

Cross entropy of logits x[t, v], v split, targets y, class weights w, smoothing e, over V classes:

    loss_t = (1 - e) w[y_t] (lse_t - x[t, y_t]) + e/V sum_v w_v (lse_t - x[t, v])
    d loss_t / d x[t, v] = (a_t + e W/V) softmax_v - a_t [v = y_t] - e w_v / V        a_t = (1-e) w[y_t], W = sum_v w_v

    lse = max + log sum_v exp(x_v - max): one all-reduce of max, one of (sum of exponentials, x[y], sum w x).

Batch norm, y = w (x - m) r + b with r = (v + eps)^(-1/2) over all n values of a channel, whatever rank holds them:

    m = sum x / n      v = sum x^2 / n - m^2            one all-reduce of (sum x, sum x^2), in float64, where the
                                                        difference loses nothing; the ranks' own sums are centred
    dx = w r (dy - sum dy / n - h sum(dy h) / n)        h = (x - m) r; one all-reduce of (sum dy, sum dy h)

Group norm of pieces of an image is the same for each row and group, where w stands inside the sums.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoddl.operators.kernels.arguments import bound, defaults
from autoddl.operators.kernels.site import Kernel, Site, TorchCall

__all__ = ["batch_norm_kernel", "batch_norm_of_module", "group_norm_kernel", "token_loss_kernel"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums of half precision are taken in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def column(vector: Tensor, rank: int) -> Tensor:
    """A vector over dim 1 of tensors of `rank` dims."""
    return vector.view(1, -1, *(1,) * (rank - 2))


class _TokenLoss(torch.autograd.Function):
    """Sum of the tokens' losses; logits [t, v here], target [t], weight [V] or None."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, site: Site, begin: int, classes: int,
                ignore: int, smoothing: float) -> Tensor:
        x = logits.to(accumulator(logits.dtype))
        size = x.shape[1]
        valid = target != ignore
        local = target - begin
        here = valid & (local >= 0) & (local < size)
        at = local.where(here, 0).unsqueeze(1)
        weights = x.new_ones(classes) if weight is None else weight.to(x.dtype)
        share = weights[begin : begin + size]
        top = site.reduce(x.amax(1), "max", site.option.inner)
        sums = [(x - top.unsqueeze(1)).exp().sum(1), x.gather(1, at).squeeze(1).where(here, 0.0)]
        if smoothing:
            sums.append(x @ share)
        total = site.reduce(torch.stack(sums), "sum", site.option.inner)
        lse = total[0].log() + top
        sure = (1 - smoothing) * weights[_classes(target.where(valid, 0))]
        loss = sure * (lse - total[1])
        if smoothing:
            loss = loss + smoothing / classes * (weights.sum() * lse - total[2])
        scale = sure + smoothing / classes * weights.sum()
        ctx.save_for_backward(logits, lse, at, here, valid, sure, scale, share)
        ctx.smooth = smoothing / classes
        return loss.where(valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        logits, lse, at, here, valid, sure, scale, share = ctx.saved_tensors
        grad = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_().mul_(scale.unsqueeze(1))
        grad.scatter_add_(1, at, -sure.where(here, 0.0).unsqueeze(1))
        if ctx.smooth:
            grad -= ctx.smooth * share
        grad = grad.mul_((valid * upstream).unsqueeze(1)).to(logits.dtype)
        return grad, None, None, None, None, None, None, None


def _classes(target: Tensor) -> Tensor:
    """The labels, none of which may count from the end: an error at once on the CPU, later on a GPU."""
    if target.is_cuda:
        torch._assert_async((target >= 0).all(), "a label below 0 that is not ignore_index")
    elif target.numel() and (least := int(target.amin())) < 0:
        raise IndexError(f"label {least} is below 0 and not ignore_index: give labels from 0 on, or name it")
    return target


def token_loss_kernel(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
                      ) -> TorchCall:
    """Returns the call of cross entropy that works where the vocabulary is split; other calls are left alone."""
    if not site.option.inner:
        return target, args, kwargs
    values = defaults(target) | bound(target, args, kwargs)
    dim = min(1, len(site.inputs[0].shape) - 1)
    begin, classes = site.input_extents(0)[dim][0], site.inputs[0].shape[dim]
    ignore, smoothing = values["ignore_index"], values["label_smoothing"]

    def vocabulary_loss(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        rows = logits.movedim(dim, -1).reshape(-1, logits.shape[dim])
        loss: Tensor = _TokenLoss.apply(rows, labels.reshape(-1), weight, site, begin, classes,  # type: ignore[no-untyped-call]
                                        ignore, smoothing)
        return loss

    return vocabulary_loss, (values["logits"], values["target"], values["weight"]), {}


def _moments(values: Tensor, dims: list[int], site: Site, n: int) -> tuple[Tensor, Tensor]:
    """(m, v) in float64 of all n values, of which these are the rank's along `dims`; the dims stay, with size 1."""
    own, mean = (part.double() for part in torch.var_mean(values, dims, correction=0, keepdim=True))
    count = values.numel() // max(1, mean.numel())
    total = site.reduce(torch.stack([mean, own + mean * mean]) * (count / n), "sum", site.option.inner)
    return total[0], (total[1] - total[0] * total[0]).clamp_min(0)


def _gradient(dy: Tensor, h: Tensor, dims: list[int], site: Site, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """dx / r of normalised values h, the rank's sum of dy h and that of dy along `dims`, which stay, with size 1."""
    own = torch.stack([dy.sum(dims, keepdim=True), (dy * h).sum(dims, keepdim=True)])
    total = site.reduce(own.clone(), "sum", site.option.inner) / n
    return dy - total[0] - h * total[1], own[1], own[0]


def _as_of(gradient: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The gradient of a vector over channels in its dtype; None where there is no vector."""
    return None if dtype is None else gradient.flatten().to(dtype)


class _BatchNorm(torch.autograd.Function):
    """(y, m, r, v) of the whole batch, of which x is a piece; n values per channel in all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, site: Site, n: int, eps: float) -> Any:
        values, dims = x.to(accumulator(x.dtype)), [d for d in range(x.dim()) if d != 1]
        moments = _moments(values, dims, site, n)
        mean, r, variance = (one.to(values.dtype) for one in (moments[0], (moments[1] + eps).rsqrt(), moments[1]))
        out = (values - mean) * r
        out = out if weight is None else out * column(weight, x.dim())
        out = (out if bias is None else out + column(bias, x.dim())).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, r)
        ctx.biased, ctx.site, ctx.n = None if bias is None else bias.dtype, site, n
        found = mean.flatten(), r.flatten(), variance.flatten()
        ctx.mark_non_differentiable(*found)
        return out, *found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
        x, weight, mean, r = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        h = (x.to(mean.dtype) - mean) * r
        dx, of_weight, of_bias = _gradient(upstream.to(mean.dtype), h, dims, ctx.site, ctx.n)
        dx = dx * (r if weight is None else r * column(weight, x.dim()))
        return (dx.to(x.dtype), _as_of(of_weight, None if weight is None else weight.dtype),
                _as_of(of_bias, ctx.biased), None, None, None)


class _GroupNorm(torch.autograd.Function):
    """y of the groups here, of whose places x is a piece; n values per group in all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, site: Site, groups: int, n: int,
                eps: float) -> Tensor:
        values = x.to(accumulator(x.dtype)).reshape(x.shape[0], groups, -1)
        moments = _moments(values, [2], site, n)
        mean, r = moments[0].to(values.dtype), (moments[1] + eps).rsqrt().to(values.dtype)
        h = ((values - mean) * r).view(x.shape)
        ctx.save_for_backward(x, weight, mean, r)
        ctx.biased, ctx.site, ctx.n = None if bias is None else bias.dtype, site, n
        h = h if weight is None else h * column(weight, x.dim())
        return (h if bias is None else h + column(bias, x.dim())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, weight, mean, r = ctx.saved_tensors
        rows, dims = (*mean.shape[:2], -1), [d for d in range(x.dim()) if d != 1]
        dy, h = upstream[0].to(mean.dtype), (x.to(mean.dtype).reshape(rows) - mean) * r
        of_weight = None if weight is None else _as_of((dy * h.view(x.shape)).sum(dims), weight.dtype)
        of_bias = None if ctx.biased is None else _as_of(dy.sum(dims), ctx.biased)
        dy = (dy if weight is None else dy * column(weight, x.dim())).reshape(rows)
        dx = _gradient(dy, h, [2], ctx.site, ctx.n)[0] * r
        return dx.view(x.shape).to(x.dtype), of_weight, of_bias, None, None, None, None


def group_norm_kernel(whole: Kernel) -> Kernel:
    """The kernel of group norm that takes the statistics of whole groups where places are split; else `whole`."""
    def kernel(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
        if not site.option.inner:
            return whole(site, target, args, kwargs)
        values = defaults(target) | bound(target, args, kwargs)
        shape, here = site.inputs[0].shape, site.input_shape(0)[1]
        groups, eps = values["num_groups"] * here // shape[1], values["eps"]
        n = prod(shape[1:]) // values["num_groups"]

        def synchronised(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            found: Tensor = _GroupNorm.apply(x, weight, bias, site, groups, n, eps)  # type: ignore[no-untyped-call]
            return found

        return synchronised, tuple(values[name] for name in ("input", "weight", "bias")), {}

    return kernel


BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


def batch_norm_of_module(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
                         running_var: Tensor, training: bool, momentum: float, eps: float
                         ) -> tuple[Tensor | None, ...]:
    """Batch norm as a module calls it: (output, None, None, new mean, new variance), whose inputs stay as they are.

    The functional operator has PyTorch's own kernel alone, this one cuDNN's where there is one. For VGG-16 in float32
    an H100 took 28 ms by the first, and about 8 by the second.
    """
    mean, variance = running_mean.clone(), running_var.clone()
    return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps), None, None, mean, variance


def batch_norm_kernel(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
                      ) -> TorchCall:
    """Returns the call of training batch norm that takes the statistics of the whole batch where the batch is split."""
    values = bound(target, args, kwargs)
    if not site.option.inner:
        def whole(x: Tensor, *others: Any) -> Any:
            return (batch_norm_of_module if x.is_cuda else target)(x, *others)

        return whole, tuple(values[name] for name in BATCH_NORM), {}
    n = prod(size for d, size in enumerate(site.inputs[0].shape) if d != 1)
    momentum, eps = values["momentum"], values["eps"]

    def synchronised(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
                     running_var: Tensor) -> tuple[Tensor, ...]:
        out, mean, r, variance = _BatchNorm.apply(x, weight, bias, site, n, eps)  # type: ignore[no-untyped-call]
        unbiased = variance * (n / max(1, n - 1))
        return (out, mean, r, running_mean.lerp(mean.to(running_mean.dtype), momentum),
                running_var.lerp(unbiased.to(running_var.dtype), momentum))

    return synchronised, tuple(values[name] for name in BATCH_NORM[:5]), {}
