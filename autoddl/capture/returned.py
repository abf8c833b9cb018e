"""Says what a module's forward returns: the names of its tensors, and how its output is built of them again.

    (loss, h)                      loss, 1                    a tuple's are named by their place, the loss is `loss`
    {"loss": ..., "logits": ...}   loss, logits
    an output of transformers      loss, logits, past_key_values.0.0
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["LOSS", "Returned", "returned"]

LOSS = "loss"


@dataclass(frozen=True)
class Returned:
    """The output of forward.

        names    the names of its tensors, in the order of the graph's outputs: the loss first
        places   by leaf of the output, the position of its tensor among them, -1 for what is no tensor
        plain    by leaf of the output, its value where it is no tensor
        spec     the tree of the output
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    plain: tuple[Any, ...]
    spec: pytree.TreeSpec

    def build(self, values: Mapping[str, Any]) -> Any:
        """The output with these tensors by name; the others are None."""
        leaves = [value if place < 0 else values.get(self.names[place])
                  for place, value in zip(self.places, self.plain, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


def returned(spec: pytree.TreeSpec, leaves: Sequence[Any], tensors: Sequence[int]) -> Returned:
    """The output of the tree `spec`; `tensors` are the positions of its leaves that are tensors, the loss first.

    Of all other leaves `leaves` has the values.
    """
    paths = dict(_named(pytree.tree_unflatten(list(range(len(leaves))), spec), ""))
    place = {leaf: k for k, leaf in enumerate(tensors)}
    names = (LOSS, *(paths[leaf] for leaf in tensors[1:]))
    return Returned(names, tuple(place.get(k, -1) for k in range(len(leaves))),
                    tuple(None if k in place else leaf for k, leaf in enumerate(leaves)), spec)


def _named(value: Any, path: str) -> Iterator[tuple[int, str]]:
    """Every leaf with its path."""
    if isinstance(value, int):
        yield value, path
        return
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, tuple | list):
        parts = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        parts = list(enumerate(pytree.tree_leaves(value)))
    for key, part in parts:
        yield from _named(part, f"{path}.{key}" if path else str(key))
