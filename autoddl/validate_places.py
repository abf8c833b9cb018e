"""Where and with what a published run ran: its cluster and its training software, from the words of its row.

    cluster     GPUs of a node on the named link, nodes on one port per GPU of inter_Gbps_per_node / gpus_per_node
    software    what the program is known to do: fused kernels, fused attention, what it sends while it computes

A device or link is known by the beginning of its name. What a row does not tell about the network is that of the
generation's reference system (NVIDIA DGX A100 and DGX H100 user guides: one 200 or 400 Gb/s port per GPU; DGX-2: 8
ports of 100 Gb/s for 16).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from autoddl.cost_models import Cluster, load_device
from autoddl.cost_models.links import expanded
from autoddl.cost_models.machine import Level
from autoddl.cost_models.units import parse
from autoddl.errors import InputError
from autoddl.validate_runs import Run

__all__ = ["Software", "attention_slowdown", "cluster_of", "software_of"]

DEVICES: Mapping[str, tuple[str, float]] = MappingProxyType({
    "H100-96GB": ("H100-96GB", 50e9), "H100": ("H100-80GB", 50e9), "A100-SXM4-40GB": ("A100-40GB", 25e9),
    "A100": ("A100-80GB", 25e9), "V100": ("V100-32GB", 6.25e9), "H200": ("H200-141GB", 50e9),
    "B200": ("B200-180GB", 50e9), "MI300X": ("MI300X-192GB", 50e9), "MI250X": ("MI250X-GCD", 12.5e9)})
"""Beginning of gpu_type -> (device of hardware/, network bytes/s per GPU where a row does not tell)."""
LINKS: Mapping[str, str] = MappingProxyType({
    "NVLink5": "NVLink5", "NVLink4": "NVLink4", "NVLink3": "NVLink3", "NVLink2": "NVLink2", "xGMI": "xGMI3"})


@dataclass(frozen=True, slots=True)
class Software:
    """What a training program does. `attention`: `products`, `flash-1`, `flash-2`, else the best kernels of the device;
    `overlaps`: which of tp, dp, cp, ep it sends beside computation; `gradient`: bytes of a gradient on the wire;
    `update`: bytes moved per parameter by clipping and optimizer; `host`: seconds of the host per operator of the
    graph, with its part of autograd and of Python, which a faster device waits for (assumed, of the order that runs of
    small microbatches show)."""

    fuses: bool = True
    attention: str = "best"
    dropout: bool = False
    overlaps: frozenset[str] = frozenset(("dp", "cp"))
    gradient: int = 4
    update: int = 40
    host: float = 100e-6


FLASH_1 = 1.8
"""FlashAttention 1 beside 2: about twice the seconds (Dao 2023, FlashAttention-2), here 1.8 as fitted to the long
sequences of published runs on A100."""
FLASH_2 = 1.75
"""FlashAttention-2 beside kernels made for Hopper: 1.5 to 2 times the seconds (Shah et al. 2024, FlashAttention-3)."""

SOFTWARE: Mapping[str, Software] = MappingProxyType({
    # Megatron-LM up to 2022: fused bias-gelu, bias-dropout-add and scale-mask-softmax; attention by two products;
    # DDP of its own that reduces half-precision gradients after the last backward; dropout 0.1 (its examples).
    "Megatron-LM": Software(attention="products", dropout=True, overlaps=frozenset(), gradient=2),
    "Megatron-DeepSpeed": Software(attention="products", dropout=True, overlaps=frozenset(), gradient=2),
    # NeMo's recipes: sequence-parallel collectives pipelined with products (tp_comm_overlap), distributed optimizer
    # with overlap_grad_reduce and overlap_param_gather; that gradients are reduced in half precision is assumed.
    "NeMo": Software(overlaps=frozenset(("tp", "dp", "cp")), gradient=2),
    # Megatron-Bridge's recipes: the same, and the exchange among experts beside another microbatch (moe_a2a_overlap of
    # its Qwen3 for H100), for which a pipeline has to be interleaved.
    "Megatron-Bridge": Software(overlaps=frozenset(("tp", "dp", "cp", "ep")), gradient=2),
    "MaxText": Software(),
    # FSDP in eager mode: prefetched gathers, reduction in float32 (llm-foundry's DEFAULT); that its tables
    # are of FlashAttention 1 is inferred from their long sequences, the tables only say "flash".
    "PyTorch FSDP": Software(fuses=False, attention="flash-1"),
    "torchtitan": Software(fuses=False, attention="flash-2"),
})
"""Beginning of framework -> what it does; the longest beginning wins, else a modern one."""


def software_of(run: Run) -> Software:
    """What is known of the program; compiled where the notes say so."""
    known = [name for name in SOFTWARE if run.framework.startswith(name)]
    found = SOFTWARE[max(known, key=len)] if known else Software()
    return replace(found, fuses=True) if "compile" in run.notes else found


def attention_slowdown(run: Run, software: Software) -> float:
    """How many times longer fused attention takes than with the best kernels of the device."""
    hopper = FLASH_2 if run.device.startswith(("H100", "H200")) else 1.0
    return {"flash-1": FLASH_1 * hopper, "flash-2": hopper}.get(software.attention, 1.0)


@lru_cache(maxsize=512)
def _cluster(device: str, gpus: int, node: int, link: str, network: float, tuned: float) -> Cluster:
    base, usual = next((DEVICES[name] for name in DEVICES if device.startswith(name)), ("", 0.0))
    if not base:
        raise InputError(f"gpu_type {device!r} is none of {', '.join(DEVICES)}; add its figures to hardware/")
    inside = next((LINKS[name] for name in LINKS if link.startswith(name)), None)
    if inside is None:
        raise InputError(f"intra_link {link!r} is none of {', '.join(LINKS)}; add it to hardware/links.yaml")
    facts = expanded({"link": inside})
    size = min(gpus, node)
    rate = network / node if network else usual
    levels = [Level("node", size, parse(facts["bandwidth"], "bytes/s"), parse(facts["latency"], "seconds"),
                    protocol=facts["protocol"], efficiency=facts["efficiency"],
                    in_network_reduction=inside in ("NVLink4", "NVLink5"),
                    in_network_efficiency=facts.get("in_network_efficiency", 0.85))]
    if gpus > size:
        levels.append(Level("net", gpus // size, rate, 14e-6, topology="fat-tree", protocol="rdma"))
    found = load_device(base)
    found = replace(found, efficiency=min(1.0, found.efficiency * tuned))
    return Cluster(f"{device} x {gpus}", found, tuple(levels), "nccl")


def cluster_of(run: Run, ranks: int = 0) -> Cluster:
    """The cluster of a run; with `ranks` only so many nodes of it as hold them."""
    nodes = -(-ranks // run.node) if ranks else run.gpus
    return _cluster(run.device, min(run.gpus, nodes * run.node), run.node, run.link, run.network, run.tuned)
