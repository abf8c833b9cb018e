"""Attention by a mask that is causal, or that blocks nothing, is attention without one.

PyTorch has kernels for `is_causal`, which skip what lies above the diagonal. A mask is read by slower ones, and a model
that is traced often makes one where a model that runs makes none. What a mask blocks is known where it is made of no
parameter, no buffer, no constant and no input, as `arange(n)[:, None] >= arange(n)` is. Then it is computed once.

    blocks nothing                                          attn_mask=None
    blocks all above the diagonal, keys as many as queries  attn_mask=None, is_causal=True
    anything else                                           stays
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from autoddl.capture.rewrites.constant_values import behind, is_drawn

__all__ = ["KnownMasks"]

LARGEST = 2**26
"""Elements of the largest tensor that is computed, 8,192 queries by as many keys."""
PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
ATTENTION = torch.nn.functional.scaled_dot_product_attention


class KnownMasks:
    """What the masks of a trace block, by the nodes that made them and how many writes there were until then."""

    def __init__(self) -> None:
        self._found: dict[tuple[Node, int], str] = {}

    def instead(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns attention without its mask, where that is the same; else NotImplemented."""
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs if func is ATTENTION else {}
        mask = given.get("attn_mask")
        if not isinstance(mask, Tensor) or mask.dim() < 2 or given.get("is_causal"):
            return NotImplemented
        rows = given["query"].shape[:-2]
        blocks = self._blocks(mask) if torch.broadcast_shapes(rows, mask.shape[:-2]) == rows else ""
        if not blocks:
            return NotImplemented
        return func(**given | {"attn_mask": None, "is_causal": blocks == "above"})

    def _blocks(self, mask: Tensor) -> str:
        """Whether a mask blocks "nothing", all "above" the diagonal, or something else, ""."""
        mode: Any = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(mask, mode.tracer, None)
        if slot is None:
            return ""
        node: Node = slot.node if isinstance(slot, Proxy) else slot.proxy.node
        writes = [one for one in node.graph.nodes if isinstance(one.target, torch._ops.OpOverload)
                  and one.target._schema.is_mutable]
        at = node, len(writes)
        if at not in self._found:
            with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), _disable_current_modes(), \
                    torch.no_grad():
                value = _made(node, writes)
                self._found[at] = "" if value is None else _blocked(value)
        return self._found[at]


def _made(node: Node, writes: Sequence[Node]) -> Tensor | None:
    """The value of a tensor, or None where it follows from more than numbers that are written down, or is too large."""
    graph, found = node.graph, dict[Node, Any]()
    needed = behind([node], writes)
    if any(one.op != "call_function" or is_drawn(one) or _size(one) > LARGEST for one in needed):
        return None
    for one in graph.nodes:
        if one in needed:
            function: Callable[..., Any] = one.target
            found[one] = function(*map_arg(one.args, found.__getitem__), **map_arg(one.kwargs, found.__getitem__))
    value: Tensor = found[node]
    return value


def _size(node: Node) -> int:
    """Elements that a node writes; none for a view that repeats."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) and 0 not in value.stride() else 0


def _blocked(mask: Tensor) -> str:
    queries, keys = mask.shape[-2:]
    for dim in (d for d in range(mask.dim()) if mask.stride(d) == 0):
        mask = mask.narrow(dim, 0, 1)  # repeated
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~seen] > torch.finfo(mask.dtype).min).any()):
        return ""
    if bool(seen.all()):
        return "nothing"
    return "above" if queries == keys and bool((seen == torch.ones(queries, keys).tril().bool()).all()) else ""
