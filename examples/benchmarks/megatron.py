"""How `small_models` are cut by hand: what is gathered together, and Megatron's columns and rows.

    parts(model)               modules in the order of use, for fully_shard and replicate
    megatron(model, sequence)  the plan of parallelize_module; with `sequence`, what lies between is split by tokens
    whole_head(model)          the head is cut by the vocabulary, and so is the loss

A mixture's experts are cut like a dense layer: each rank has some columns of every expert's gate and up, and the same
rows of its down (`Experts`).
"""

from typing import Any

import torch
from small_models import GPT, VGG, Loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["Experts", "megatron", "parts", "whole_head"]


def parts(model: Any) -> list[nn.Module]:
    if isinstance(model, GPT):
        return [model.tokens, *model.blocks, model.head]
    if isinstance(model, VGG):
        return [part for _, part in model.named_children()]
    inner: Any = model.model
    if hasattr(inner, "vit"):
        return [inner.vit.embeddings, *inner.vit.layers, inner.classifier]
    return [inner.model.embed_tokens, *inner.model.layers, inner.lm_head]


def whole_head(model: nn.Module) -> bool:
    return isinstance(model, GPT) or (isinstance(model, Loss) and hasattr(model.model, "lm_head"))


def megatron(model: nn.Module, sequence: bool) -> dict[str, Any]:
    if isinstance(model, VGG):
        return {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    kept: Any = Shard(1) if sequence else Replicate()
    if isinstance(model, GPT):
        return _gpt(len(model.blocks), kept, sequence)
    return _decoder(model, kept, sequence) if whole_head(model) else _vit(model)


def _ends(tokens: str, head: str, kept: Any) -> dict[str, Any]:
    """Both ends of a decoder by its vocabulary."""
    return {tokens: RowwiseParallel(input_layouts=Replicate(), output_layouts=kept),
            head: ColwiseParallel(input_layouts=kept, output_layouts=Shard(-1), use_local_output=False)}


def _gpt(layers: int, kept: Any, sequence: bool) -> dict[str, Any]:
    plan = _ends("tokens", "head", kept)
    if sequence:
        plan |= {"positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
                 "norm": SequenceParallel()}
    for i in range(layers):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel(input_layouts=kept) for name in ("qkv", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel(output_layouts=kept) for name in ("o", "down")}
        if sequence:
            plan |= {f"blocks.{i}.{name}": SequenceParallel() for name in ("norm1", "norm2")}
    return plan


def _vit(model: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for i in range(len(model.model.vit.layers)):
        at = f"model.vit.layers.{i}."
        plan[f"{at}attention"] = PrepareModuleInput(input_layouts=(Replicate(), None),
                                                    desired_input_layouts=(Replicate(), None))
        plan |= {f"{at}{name}": ColwiseParallel() for name in (*_attention("attention"), "mlp.fc1")}
        plan |= {f"{at}{name}": RowwiseParallel() for name in ("attention.o_proj", "mlp.fc2")}
    return plan


def _attention(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}_proj" for part in "qkv")


def _decoder(model: Any, kept: Any, sequence: bool) -> dict[str, Any]:
    """Llama, and a mixture: modules that look at the number of tokens get them all. What attention or a dense layer
    gets goes to all of its columns as one tensor, so that its gradients are summed once."""
    plan = _ends("model.model.embed_tokens", "model.lm_head", Replicate() if sequence else kept)
    if sequence:
        plan["model.lm_head"] = ColwiseParallel(input_layouts=kept, output_layouts=Shard(-1), use_local_output=False)
        plan["model.model.norm"] = SequenceParallel(use_local_output=True)
    for i, layer in enumerate(model.model.model.layers):
        at, dense, every = f"model.model.layers.{i}.", not hasattr(layer.mlp, "experts"), Replicate()
        columns = _attention("self_attn") + (("mlp.gate_proj", "mlp.up_proj") if dense else ())
        plan |= {f"{at}{name}": ColwiseParallel() for name in columns}
        plan[f"{at}self_attn"] = PrepareModuleInput(input_kwarg_layouts={"hidden_states": kept},
                                                    desired_input_kwarg_layouts={"hidden_states": every})
        plan[f"{at}self_attn.o_proj"] = RowwiseParallel(output_layouts=kept)
        if dense:
            plan[f"{at}mlp"] = PrepareModuleInput(input_layouts=(kept,), desired_input_layouts=(every,))
            plan[f"{at}mlp.down_proj"] = RowwiseParallel(output_layouts=kept)
        else:
            plan[f"{at}mlp.experts"] = Experts(summed=not sequence)
        plan |= _by_tokens(at, first=i == 0, dense=dense) if sequence else {}
    return plan


def _by_tokens(at: str, first: bool, dense: bool) -> dict[str, Any]:
    """Norms and sums of a layer have a part of the tokens; a mixture, like attention, gathers them."""
    split: Any = (Shard(1),)
    every: Any = (Replicate(),)
    plan: dict[str, Any] = {f"{at}{name}": SequenceParallel(use_local_output=True) for name in
                            ("input_layernorm", "post_attention_layernorm")}
    if not dense:
        plan[f"{at}mlp"] = PrepareModuleInputOutput(
            input_layouts=split, desired_input_layouts=every, use_local_input=True,
            output_layouts=(Partial(),), desired_output_layouts=split)
    if first:
        plan[at.removesuffix(".")] = PrepareModuleInput(input_layouts=every, desired_input_layouts=split,
                                                        use_local_output=True)
    return plan


class Experts(ParallelStyle):
    """Columns of gate and of up in every expert, rows of down; what comes of them is `summed`, or left to be. Gradients
    of what goes in are summed likewise. The router is on every rank, for its tokens are."""

    def __init__(self, summed: bool) -> None:
        self.summed = summed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        gate, up = experts.gate_up_proj.chunk(2, 1)
        mine = torch.cat([gate.chunk(ranks, 1)[rank], up.chunk(ranks, 1)[rank]], 1)
        experts.gate_up_proj = nn.Parameter(mine.detach().clone())
        experts.down_proj = nn.Parameter(experts.down_proj.chunk(ranks, 2)[rank].detach().clone())

        def shared(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            return DTensor.from_local(value, device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])

        def summed(_: nn.Module, given: Any, out: Tensor) -> Tensor:
            return DTensor.from_local(out, device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(lambda _, given: tuple(shared(value) for value in given))
        if self.summed:
            module.register_forward_hook(summed)
        return module
