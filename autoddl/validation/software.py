"""What the training program of a published run is known to do, from the words of its row.

    software    fused kernels, fused attention, what it sends while it computes, what it recomputes by `selective`

A program is known by the beginning of its name, the longest that is listed; an unknown one is taken to be modern.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoddl.pricing.price import HOST, UPDATE
from autoddl.validation.runs import Run

__all__ = ["Software", "attention_slowdown", "biased", "recomputed", "software_of"]


@dataclass(frozen=True, slots=True)
class Software:
    """What a training program does. `attention`: `products`, `flash-1`, `flash-2`, else the best kernels of the device;
    `overlaps`: which of tp, dp, cp, ep it sends beside computation; `gradient`: bytes of a gradient on the wire;
    `update`: bytes moved per parameter by clipping and optimizer; `host`: seconds of the host per operator of the
    graph, with its part of autograd and of Python, which a faster device waits for (assumed, of the order that runs of
    small microbatches show); `selective`: what recomputation by that name repeats, attention's core or operators;
    `unpads`: it copies queries, keys and values into one row without padding before fused attention, and back;
    `unpacked`, `packed`: bytes per parameter that ZeRO-3 moves on a device per gather and per reduction of a layer,
    besides what goes over links; `apart`: biases of experts and clamps of their gates are kernels of their own
    (`validate_biased`)."""

    fuses: bool = True
    attention: str = "best"
    dropout: bool = False
    overlaps: frozenset[str] = frozenset(("dp", "cp"))
    gradient: int = 4
    update: int = UPDATE
    host: float = HOST
    selective: str = "core"
    unpads: bool = False
    unpacked: float = 0.0
    packed: float = 0.0
    apart: bool = False


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
    "NeMo": Software(overlaps=frozenset(("tp", "dp", "cp")), gradient=2, apart=True),
    # Megatron-Bridge's recipes: the same, and the exchange among experts beside another microbatch (moe_a2a_overlap of
    # its Qwen3 for H100), for which a pipeline has to be interleaved.
    "Megatron-Bridge": Software(overlaps=frozenset(("tp", "dp", "cp", "ep")), gradient=2, apart=True),
    "MaxText": Software(),
    # FSDP in eager mode: prefetched gathers, reduction in float32 (llm-foundry's DEFAULT); that its tables
    # are of FlashAttention 1 is inferred from their long sequences, the tables only say "flash". Before a layer's
    # gradients are reduced they are put together in one (4 bytes a value), cast to float32 (6) and divided (8; PyTorch,
    # fsdp/_runtime_utils.py: _post_backward_hook, _reduce_grad; _flat_param.py: the views are made by split).
    # Padding is taken out around attention whether there is any or not (llm-foundry, attention.py, flash_attn_fn:
    # unpad_input and pad_input of flash-attn 1.0.3). Composer's DecoupledAdamW is a loop of nine elementwise kernels
    # (88 bytes a value), clipping two passes (12).
    "PyTorch FSDP": Software(fuses=False, attention="flash-1", unpads=True, packed=18, update=100),
    # FSDP2 copies what was gathered into the parameters (4), and gradients, cast, into one (6; _fsdp_collectives.py).
    "torchtitan": Software(fuses=False, attention="flash-2", selective="operators", unpacked=4, packed=6),
})
"""Beginning of framework -> what it does; the longest beginning wins, else a modern one."""


def software_of(run: Run) -> Software:
    """What is known of the program; compiled where the notes say so."""
    known = [name for name in SOFTWARE if run.framework.startswith(name)]
    found = SOFTWARE[max(known, key=len)] if known else Software()
    return replace(found, fuses=True) if "compile" in run.notes else found


WINDOWS: Mapping[str, int] = MappingProxyType({"GPT-OSS": 128})
"""Beginning of a model's name -> keys that a query sees in every other layer (config.json: sliding_window)."""
BLOCK = 128
"""Queries and keys of a block of fused attention, as in `kernel`."""


def _seen(run: Run) -> float:
    """Keys seen beside those of causal attention, on the mean of layers, in whole blocks."""
    window = next((WINDOWS[name] for name in WINDOWS if run.model.startswith(name)), 0)
    return (1 + min(1.0, 2 * (window + BLOCK) / (run.seq + BLOCK))) / 2 if window else 1.0


def attention_slowdown(run: Run, software: Software) -> float:
    """How many times longer fused attention takes than with the best kernels of the device and all keys."""
    hopper = FLASH_2 if run.device.startswith(("H100", "H200")) else 1.0
    return _seen(run) * {"flash-1": FLASH_1 * hopper, "flash-2": hopper}.get(software.attention, 1.0)


BIASED = ("GPT-OSS",)
"""Beginnings of models whose experts have biases and clamp their gates (config.json: swiglu_limit; Megatron-Bridge,
models/gpt_oss/gpt_oss_provider.py: add_bias_linear, activation_func_clamp_value)."""


def biased(run: Run, software: Software) -> bool:
    """Whether experts have biases and clamped gates that the program computes by kernels of their own."""
    return software.apart and run.experts > 0 and run.model.startswith(BIASED)


RECIPES: Mapping[tuple[str, str, str], str] = MappingProxyType({
    # Megatron-Bridge, scripts/performance/configs/gpt_oss: recompute_modules=["layernorm", "moe_act"] on H100
    ("Megatron-Bridge", "GPT-OSS-120B", "H100"): "modules",
})
"""Beginnings of program, model and device -> what a recipe recomputes where a row refers to it."""


def _by_recipe(run: Run) -> str:
    """What the recipe recomputes; empty where that was not looked up."""
    words = (run.framework, run.model, run.device)
    return next((how for names, how in RECIPES.items() if all(map(str.startswith, words, names))), "")


def recomputed(run: Run) -> str:
    """What is computed again for backward: none, full, core (attention's), operators, or modules (the second norm and
    the experts' activation); empty where a row does not tell."""
    words = run.recompute
    if words.startswith("recipe"):
        return _by_recipe(run)
    if not words.startswith("selective"):
        return next((kind for kind in ("none", "full") if words.startswith(kind)), "")
    if "core" in words or "op" in words:
        return "core" if "core" in words else "operators"
    return software_of(run).selective
