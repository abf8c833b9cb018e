"""Says what a training program does beyond the operators of a model, by the name of a software profile.

    eager      PyTorch launches every operator by itself          compiled   torch.compile fuses elementwise operators
    torchtitan, composer, megatron, megatron-2022, ...             `software.yaml` has all, each fact with its source

A profile changes the device: which kernels are fused, which products are narrow, how far fused attention gets. The rest
are terms of a step (`schedule.run_step`): seconds of the host, bytes that are copied, and messages that are hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models.machine import Cluster, Device

__all__ = ["HALF", "HOST", "SLOWDOWN", "SLOWER", "SOFTWARE", "SOFTWARE_FILE", "UPDATE", "Software",
           "attention_slowdown", "best_attention", "compiled_like", "run_by", "software_named", "software_rows"]

SOFTWARE_FILE = Path(__file__).parent / "software.yaml"

HOST = 100e-6
"""Seconds of the host per operator of the graph and pass, where a program launches kernels one by one."""

HALF = 2
"""Bytes of a value in half precision."""

UPDATE = 40
"""Bytes that clipping and AdamW move per parameter."""


SLOWDOWN = 1.2
"""How much longer computation and communication take where they run at once. Within the 1.1 to 1.3 of Galvatron
(Miao et al. 2022, section 3.4), chosen with published runs in view."""


@dataclass(frozen=True, slots=True)
class Software:
    """The behaviour of a training program beyond the operators of a model."""

    fuses: bool = True
    """Whether chains of elementwise operators are one kernel."""
    by_hand: bool = False
    """Whether such kernels are written by hand, or compiled with what backward runs again: that is fused too."""
    attention: str = "best"
    """Attention by two `products`, by a generation of fused attention (`flash-1`), or by the `best` of the device."""
    dropout: bool = False
    """Whether it trains with dropout."""
    masks_apart: bool = False
    """Whether scores of attention by two products are divided and masked by operators of their own."""
    overlaps: frozenset[str] = frozenset(("dp", "cp"))
    """Degrees of parallelism, of tp, dp, cp and ep, whose messages are sent beside computation."""
    gradient: int = 4
    """Bytes of a gradient on the wire."""
    update: int = UPDATE
    """Bytes that clipping and the optimizer move per parameter."""
    host: float = HOST
    """Seconds of the host per operator of the graph and pass, with its part of autograd and of Python. A faster device
    waits for it. Assumed: of the order that runs of small microbatches show."""
    selective: str = "core"
    """What selective recomputation repeats: the `core` of attention, or every other product (`operators`)."""
    narrow: str = ""
    """Dtype in which products with weights are computed, whose factors are cast; empty for that of the tensors."""
    scaling: str = "delayed"
    """Whether the scale of a cast is known before its values (`delayed`), or is read from them (`current`)."""
    low_norms: bool = False
    """Whether norms compute in the dtype of the stream, without casts to float32 and back."""
    norms_in_rows: bool = False
    """Whether its RMSNorm and rotation are rows of operators on float32 copies, which only a compiler makes one of."""
    unpads: bool = False
    """Whether queries, keys and values are copied into one row without padding around fused attention, and back."""
    biases_apart: bool = False
    """Whether biases behind experts and clamps of their gates are kernels of their own (`operators.expert_rows`)."""
    joins: bool = False
    """Whether shards of a sequence are joined by a copy behind a gather, and cut by one before a reduce-scatter."""
    pads_rows: bool = False
    """Whether rows of experts are copied once more before their products and behind them, to be padded."""
    rotates_apart: bool = False
    """Whether queries and keys are turned by rows of operators, and by no kernel of their own."""
    unpacked: float = 0.0
    """Bytes per parameter that ZeRO-3 moves on a device per gather of a layer, besides what links carry."""
    packed: float = 0.0
    """Bytes per parameter that ZeRO-3 moves on a device per reduction of a layer, besides what links carry."""

    @property
    def trains_in_half(self) -> bool:
        """Whether all but the optimizer is in half precision, as gradients on the wire are."""
        return self.gradient == HALF

    @property
    def precision(self) -> str:
        """Its precision, as `plan --precision` reads it."""
        return "bf16" if self.trains_in_half else "bf16-mixed"

    @property
    def optimizer(self) -> str:
        """Its optimizer, as `plan --optimizer` reads it: in half precision one that holds what its update moves."""
        return f"{(self.update - 3 * HALF) / 2:g} B" if self.trains_in_half else "adamw"


def _read(section: str) -> dict[str, dict[str, Any]]:
    """The rows of a section of `software.yaml`, without the sources."""
    tree = yaml.safe_load(SOFTWARE_FILE.read_text(encoding="utf-8"))
    return {name: {field: value for field, value in row.items() if field != "sources"}
            for name, row in tree[section].items()}


def software_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows with the fields of the rows above that they are `like`, but for those that they have themselves.

    Raises InputError for a `like` that names no row above.
    """
    found = dict[str, dict[str, Any]]()
    for name, row in rows.items():
        like = row.get("like")
        if like is not None and like not in found:
            raise InputError(f"the profile {name!r} is like {like!r}, which is no profile above it; "
                             + near_names(str(like), found, f"above are {', '.join(found)}"))
        found[name] = (found[like] if like else {}) | {field: row[field] for field in row if field != "like"}
    return found


def _software(row: Mapping[str, Any]) -> Software:
    sets = {"overlaps": frozenset(row["overlaps"])} if "overlaps" in row else {}
    return Software(**dict(row) | sets)


SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {name: _software(row) for name, row in software_rows(_read("profiles")).items()})
"""Name of a profile -> what it does."""

SLOWER: Mapping[str, float] = MappingProxyType({name: row["slower"] for name, row in _read("attention").items()})
"""Generation of fused attention, oldest first -> how many times longer it takes than the next."""

_BEST: Mapping[str, str] = MappingProxyType({name: row["generation"] for name, row in _read("devices").items()})


def software_named(name: str) -> Software:
    """The profile of a name. Raises InputError for an unknown one."""
    if name not in SOFTWARE:
        near = near_names(name, SOFTWARE, f"there are {', '.join(SOFTWARE)}", most=1)
        raise InputError(f"there is no software {name!r}; {near}")
    return SOFTWARE[name]


def compiled_like(name: str) -> str:
    """The profile of a program that runs eager, as it runs compiled; empty for one that fuses its kernels."""
    return "" if software_named(name).fuses else f"{name}-compiled" if f"{name}-compiled" in SOFTWARE else "compiled"


def best_attention(device: str) -> str:
    """The best generation of fused attention on a device, by the beginning of its name."""
    found = max((one for one in _BEST if device.lower().startswith(one.lower())), key=len, default="")
    return _BEST[found] if found else "flash-2"


def attention_slowdown(software: Software, device: str) -> float:
    """How many times longer fused attention takes by a program's kernels than by the device's best."""
    factor, generations = 1.0, list(SLOWER)
    if software.attention in SLOWER:
        for name in generations[generations.index(software.attention):generations.index(best_attention(device))]:
            factor *= SLOWER[name]
    return factor


def run_by(cluster: Cluster, software: Software, slowdown: float = 1.0) -> Cluster:
    """The cluster whose programs are those of a profile; fused attention takes `slowdown` times as long besides."""
    return replace(cluster, device=_run_by(cluster.device, software, slowdown),
                   parts=tuple((_run_by(device, software, slowdown), ranks) for device, ranks in cluster.parts))


def _run_by(device: Device, software: Software, slowdown: float) -> Device:
    """The device with its kernels fused as the profile says, and its attention as fast."""
    factor = slowdown * attention_slowdown(software, device.name)
    known = dict(device.kernels)
    if factor != 1.0:
        known |= {kind: device.efficiency_of(kind) / factor for kind in ("attention", "attention backward")}
    if software.fuses and not software.by_hand:  # a compiler writes batch norms as it does other norms
        known = {name: share for name, share in known.items() if not name.startswith("batch normalise")}
    return replace(device, kernels=tuple(sorted(known.items())), compiled=software.fuses, by_hand=software.by_hand,
                   narrow=software.narrow, scaling=software.scaling, hides=tuple(sorted(software.overlaps - {"dp"})))
