"""How an operator runs on one rank's pieces: the table op -> kernel.

    fn, args, kwargs = lower(site, target, args, kwargs)

Most operators run unchanged: the rule chose splits for which the call means the same on pieces. A kernel stands where a
call says a global size, counts globally (means, causal masks, rows of a table, dropout), or reduces inside.
"""

from collections.abc import Callable
from typing import Any

from autoddl.operators.kernels import flexible_pieces, nn, shape
from autoddl.operators.kernels.site import Kernel, Site, TorchCall

__all__ = ["KERNELS", "Site", "lower"]

KERNELS: dict[str, Kernel] = {**shape.KERNELS, **nn.KERNELS, **flexible_pieces.KERNELS}


def lower(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    """The call that computes this rank's pieces of the outputs from its pieces of the inputs."""
    kernel = KERNELS.get(site.op.target)
    return (target, args, kwargs) if kernel is None else kernel(site, target, args, kwargs)
