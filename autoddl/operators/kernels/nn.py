"""Kernels of neural network operators that do not run unchanged on pieces.

    embedding, rows split    out = table[i - offset] where the row is here, else 0; the ranks' outputs add up; an i of
                             no rank's is an error, as for the whole table
    embedding bag, likewise  a row of no rank's own has weight 0 in the sum
    affine grid              the batch that is here
    attention, queries split the causal mask moves with the offset of the first query
    attention, keys split    keys and values pass round a ring
    grouped convolution/norm as many groups as there are here
    mean losses              the local mean counts (elements here) / (all elements)
    dropout, draws           those of the whole tensor, at the place of the piece
    grouped products         the rows of the groups that are here
    experts                  rows of the experts and of the inner width that are here; or rows are sent
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from autoddl.operators.families import flagged
from autoddl.operators.kernels.arguments import bound, defaults
from autoddl.operators.kernels.dispatch import dispatched_experts
from autoddl.operators.kernels.experts import ExpertPart, routed_experts
from autoddl.operators.kernels.grouped import rows_of_groups
from autoddl.operators.kernels.halo import unchanged, with_halo
from autoddl.operators.kernels.reducing import batch_norm_kernel, group_norm_kernel, token_loss_kernel
from autoddl.operators.kernels.ring import attention_of_halves, has_all_keys, ring_attention
from autoddl.operators.kernels.site import Kernel, Site, TorchCall
from autoddl.operators.windows import INTERPOLATED, ROLL

__all__ = ["KERNELS"]

Target = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _embedding(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    if not site.splits(0, 0):
        return target, args, kwargs
    values = bound(target, args, kwargs)
    offset, rows = site.input_extents(0)[0]
    padding = values.get("padding_idx", -1) - offset
    table = site.inputs[0].shape[0]
    local_padding = padding if 0 <= padding < rows and values.get("padding_idx", -1) >= 0 else None

    def embedding_rows(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        _check_rows(indices, table, site.op.module)
        local = indices - offset
        away = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(away, 0), weight, local_padding)
        return found.masked_fill(away.unsqueeze(-1), 0.0)

    return embedding_rows, (values["weight"], values["indices"]), {}


def _embedding_bag(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    if not site.splits(0, 0):
        return target, args, kwargs
    values = bound(target, args, kwargs)
    offset, rows = site.input_extents(0)[0]
    table, share = site.inputs[0].shape[0], 1 / site.inputs[1].shape[1] if values.get("mode", 0) == 1 else 1.0

    def bags_of_rows(weight: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        _check_rows(indices, table, site.op.module)
        local = indices - offset
        away = (local < 0) | (local >= rows)
        here = weight.new_full((), share).expand(indices.shape) if scale is None else scale
        return F.embedding_bag(local.masked_fill(away, 0), weight, mode="sum",
                               per_sample_weights=here.masked_fill(away, 0.0))

    return bags_of_rows, (values["weight"], values["indices"], values.get("per_sample_weights")), {}


def _affine_grid(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = bound(target, args, kwargs)
    return target, (), {**values, "size": [site.output_shape()[0], *values["size"][1:]]}


def _check_rows(indices: torch.Tensor, rows: int, module: str) -> None:
    """Every index is of a row: an error at once on the CPU, later on a GPU, which is not waited for."""
    if indices.is_cuda:
        torch._assert_async(((indices >= 0) & (indices < rows)).all(), f"an index of no row of {module}'s {rows}")
    elif indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(f"index {low if low < 0 else high} is of no row of {module or 'an embedding'}, which has "
                             f"{rows}: give indices from 0 to {rows - 1}, or the model a larger table")


def _causal(queries: int, keys: int, offset: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, where the first query is number `offset`."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)


def _attention(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = bound(target, args, kwargs)
    if site.option.inner:
        return _ring(site, values)
    if not values.get("is_causal") or not site.splits(0, len(site.inputs[0].shape) - 2):
        return target, args, kwargs
    offset, size = site.input_extents(0)[-2]
    keys = site.inputs[1].shape[-2]
    rest = {k: v for k, v in values.items() if k not in ("query", "attn_mask", "is_causal")}

    def causal_attention(query: torch.Tensor, attn_mask: torch.Tensor | None = None, **others: Any) -> Any:
        mask = _causal(size, keys, offset, query.device)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            mask = mask & attn_mask
        elif attn_mask is not None:
            mask = attn_mask.masked_fill(~mask, float("-inf"))
        return target(query=query, attn_mask=mask, is_causal=False, **others)

    return causal_attention, (values["query"], values.get("attn_mask")), rest


def _ring(site: Site, values: Kwargs) -> TorchCall:
    causal, scale = bool(values.get("is_causal")), values.get("scale")

    def attention_in_a_ring(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        if has_all_keys(site):
            return attention_of_halves(site, query, key, value, scale)
        return ring_attention(site, query, key, value, mask, causal, scale)

    return attention_in_a_ring, tuple(values.get(name) for name in ("query", "key", "value", "attn_mask")), {}


def _dropped_attention(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    """Our attention: as above, and its dropout drawn for these rows of the probabilities (.., heads, queries, keys)."""
    fn, args, kwargs = _attention(site, target, args, kwargs)
    places, keys = site.output_extents()[:-1], site.inputs[1].shape[-2]
    index = ((*(offset for offset, _ in places), 0), (*site.outputs[0].shape[:-1], keys))

    def dropped_attention(*a: Any, **k: Any) -> Any:
        return fn(*a, **k, seed=_seed(site), index=index)

    return dropped_attention, args, kwargs


def _seed(site: Site) -> int:
    return 0 if site.seed is None else int(site.seed)


def _dropout(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    index = (tuple(offset for offset, _ in site.input_extents(0)), site.inputs[0].shape)

    def placed_dropout(*a: Any, **k: Any) -> Any:
        return target(*a, **k, seed=_seed(site), index=index)

    return placed_dropout, args, kwargs


def _draw(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = bound(target, args, kwargs) | {"size": list(site.output_shape())}
    index = (tuple(offset for offset, _ in site.output_extents()), site.outputs[0].shape)

    def placed_draw(**k: Any) -> Any:
        return target(**k, seed=_seed(site), index=index)

    return placed_draw, (), values


def _groups(name: str) -> Kernel:
    """Argument `name` counts groups of the channels, of which a rank has the share of its channels."""
    def kernel(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
        values = bound(target, args, kwargs)
        dim = 1 if name == "num_groups" else len(site.inputs[0].shape) - len(site.inputs[1].shape) + 1
        channels, here = site.inputs[0].shape[dim], site.input_shape(0)[dim]
        if values.get(name, 1) == 1 or here == channels:
            return target, args, kwargs
        return target, (), {**values, name: values[name] * here // channels}
    return kernel


def _experts(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = defaults(target) | bound(target, args, kwargs)
    first, here = site.input_extents(4)[0]
    inner = site.input_extents(4)[1 if values["transposed"] else 2]
    apart = values["halves"] == 2 and not values["paired"] and inner[1] < site.inputs[4].shape[
        1 if values["transposed"] else 2]
    part = ExpertPart(values["gate"], values["halves"], values["paired"], values["transposed"], first,
                here == site.inputs[4].shape[0], inner if apart else None)

    def experts_here(*tensors: Any) -> torch.Tensor:
        return routed_experts(part, *tensors)

    def experts_elsewhere(*tensors: Any) -> torch.Tensor:
        return dispatched_experts(site, part, *tensors)

    return experts_elsewhere if site.option.inner else experts_here, tuple(values[name] for name in EXPERTS), {}


def _grouped_mm(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = bound(target, args, kwargs)
    return rows_of_groups, (values["rows"], values["weight"], values["ends"], site.input_extents(1)[0][0]), {}


def _mean(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    """A mean over the elements of input 0."""
    share = site.share(0)
    if bound(target, args, kwargs).get("reduction", 1) != 1 or share == 1:
        return target, args, kwargs

    def share_of_mean(*a: Any, **k: Any) -> Any:
        return target(*a, **k) * share

    return share_of_mean, args, kwargs


EXPERTS = ("x", "chosen", "shares", "up", "down", "up_bias", "down_bias")
CONVOLUTIONS = """conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv_transpose1d.default
    conv_transpose2d.input conv_transpose3d.input convolution.default"""

KERNELS: dict[str, Kernel] = {
    "aten.embedding.default": _embedding,
    "autoddl.embedding_bag": _embedding_bag,
    "aten.affine_grid_generator.default": _affine_grid,
    "aten.scaled_dot_product_attention.default": _attention,
    "autoddl.attention": _dropped_attention,
    "autoddl.dropout": _dropout,
    "autoddl.draw": _draw,
    "autoddl.experts": _experts,
    "autoddl.grouped_mm": _grouped_mm,
    "autoddl.token_loss": token_loss_kernel,
    "aten._native_batch_norm_legit_functional.default": batch_norm_kernel,
    "aten.group_norm.default": group_norm_kernel(_groups("num_groups")),
    **{f"aten.{name}": with_halo(_groups("groups")) for name in CONVOLUTIONS.split()},
    **{target: with_halo(unchanged) for target in (ROLL, *INTERPOLATED)},
    **{f"aten.{kind}_pool{k}d.default": with_halo(unchanged) for k in (1, 2, 3) for kind in ("max", "avg")},
    **{f"{name}.default": _mean for name in flagged("distance")},
}
