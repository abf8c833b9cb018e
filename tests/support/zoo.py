"""Small seeded models of every family: `name(...) -> (module, sample)`; forward returns the scalar loss."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from branching import WAYS, branching
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.factory import Factory
from autoddl.capture.sample import Sample, sample_for

Made = tuple[nn.Module, Sample]


class Loss(nn.Module):
    """A Hugging Face model whose forward returns the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.attention_norm(x)
        q, k, v = (part(y).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.dropout(self.o(mixed.transpose(1, 2).reshape(batch, length, width)))
        y = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return torch.add(x, y)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int, dropout: float,
                 tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt(layers: int = 2, d: int = 32, heads: int = 4, vocab: int = 64, T: int = 16, B: int = 4, dropout: float = 0.0,
        tied: bool = True, dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    return GPT(layers, d, heads, vocab, T, dropout, tied).to(dtype), Sample((tokens(B, T, vocab), tokens(B, T, vocab)))


def tokens(B: int, T: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (B, T))


def _language(name: str, config: dict[str, Any], B: int, T: int, dtype: torch.dtype, extra: dict[str, Any]) -> Made:
    """A Hugging Face language model: `Llama` is LlamaForCausalLM of LlamaConfig."""
    import transformers

    torch.manual_seed(0)
    family = name.split("For")[0].removesuffix("LMHeadModel")
    settings = getattr(transformers, family + "Config")(vocab_size=64, use_cache=False, **config)
    model = getattr(transformers, name)(settings).to(dtype)
    return Loss(model), Sample((), {"input_ids": tokens(B, T, 64), "labels": tokens(B, T, 64), **extra})


def gpt2(layers: int = 2, B: int = 4, T: int = 16, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Made:
    config = {"n_layer": layers, "n_embd": 32, "n_head": 4, "n_positions": T, "bos_token_id": 0, "eos_token_id": 0,
              "attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout, "loss_type": "ForCausalLM"}
    return _language("GPT2LMHeadModel", config, B, T, dtype, {})


DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(layers: int = 2, B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32) -> Made:
    return _language("LlamaForCausalLM", {**DECODER, "num_hidden_layers": layers}, B, T, dtype, {})


def neox(layers: int = 2, B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32) -> Made:
    """Queries, keys and values are pieces of one product; the first two are turned, the values are kept as they are."""
    config = {"num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
              "max_position_embeddings": T, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return _language("GPTNeoXForCausalLM", config, B, T, dtype, {})


def phi3(layers: int = 2, B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32) -> Made:
    """As `neox`, but cut by slices; so are the gate and what it multiplies."""
    config = {**DECODER, "num_hidden_layers": layers, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return _language("Phi3ForCausalLM", config, B, T, dtype, {})


def mixture(layers: int = 2, B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32,
            experts: str = "batched_mm") -> Made:
    config = {**DECODER, "num_hidden_layers": layers, "num_local_experts": 4, "experts_implementation": experts}
    return _language("MixtralForCausalLM", config, B, T, dtype, {})


ROUTED: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "pad_token_id": 0,
               "sliding_window": 8},
    "DeepseekV3": {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_routed_experts": 8, "n_group": 2,
                   "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
                   "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                   "v_head_dim": 8},
}
ROUTED["DeepseekV2"] = ROUTED["DeepseekV3"]


def routed(family: str = "Mixtral", layers: int = 2, B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32,
           **more: Any) -> Made:
    """A mixture as its library runs it by default: rows sorted by expert, and grouped products."""
    config = {**DECODER, "num_hidden_layers": layers, "max_position_embeddings": T, **ROUTED[family], **more}
    return _language(f"{family}ForCausalLM", config, B, T, dtype, {})


def switch(layers: int = 2, B: int = 4, T: int = 16, capacity: int = 3, dtype: torch.dtype = torch.float32,
           **more: Any) -> Made:
    """Switch Transformers, whose experts take so many tokens of a sequence and drop the others."""
    config = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": layers, "num_decoder_layers": layers,
              "num_experts": 4, "expert_capacity": capacity, "num_sparse_encoder_layers": 1, "dropout_rate": 0.0,
              "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0, "decoder_start_token_id": 0,
              "pad_token_id": 0, **more}
    return _language("SwitchTransformersForConditionalGeneration", config, B, T, dtype, {})


def qwen3_next(B: int = 4, T: int = 16, dtype: torch.dtype = torch.float32) -> Made:
    """A layer with a delta rule and one with attention, each with experts and one that all tokens share.

    The rule goes by chunks of 8 tokens, not 64: there are two of them, and a third of the operators.
    """
    config = {**DECODER, "num_hidden_layers": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
              "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
              "layer_types": ["linear_attention", "full_attention"], "experts_implementation": "eager"}
    module, sample = _language("Qwen3NextForCausalLM", config, B, T, dtype, {})
    rule = next(one for name, one in module.named_modules() if name.endswith("linear_attn"))
    rule.register_forward_pre_hook(lambda _, args, named: (args, {**named, "chunk_size": 8}), with_kwargs=True)
    return module, sample


def looped(family: str, **options: Any) -> Made:
    """A mixture that loops over the chosen experts, which works in float64: torch's grouped products do not."""
    return routed(family, experts_implementation="eager", **options)


def mixtral(**options: Any) -> Made:
    return looped("Mixtral", **options)


def gpt_oss(**options: Any) -> Made:
    return looped("GptOss", **options)


def deepseek(**options: Any) -> Made:
    return looped("DeepseekV3", **options)


def bert(layers: int = 2, B: int = 4, T: int = 16, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Made:
    config = {"num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
              "max_position_embeddings": T, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    mask = torch.ones(B, T, dtype=torch.int64)
    return _language("BertForMaskedLM", config, B, T, dtype, {"attention_mask": mask})


def t5(layers: int = 2, B: int = 4, T: int = 16, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Made:
    config = {"num_layers": layers, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "dropout_rate": dropout,
              "decoder_start_token_id": 0}
    return _language("T5ForConditionalGeneration", config, B, T, dtype, {})


def vit(layers: int = 2, B: int = 4, image: int = 16, classes: int = 8, dtype: torch.dtype = torch.float32) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4,
                       image_size=image, patch_size=4)
    config.num_labels = classes
    images, labels = pictures(B, image, classes, dtype)
    return Loss(ViTForImageClassification(config)).to(dtype), Sample((), {"pixel_values": images, "labels": labels})


def swin(layers: int = 2, B: int = 1, image: int = 64, classes: int = 4, dtype: torch.dtype = torch.float32) -> Made:
    """Attention in windows of 4 x 4 places, of which every second layer moves the image by half a window."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    config = SwinConfig(image_size=image, patch_size=4, embed_dim=16, depths=[layers], num_heads=[2], window_size=4,
                        drop_path_rate=0.0)
    config.num_labels = classes
    images, labels = pictures(B, image, classes, dtype)
    return Loss(SwinForImageClassification(config)).to(dtype), Sample((), {"pixel_values": images, "labels": labels})


def pictures(B: int, image: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3, image, image, dtype=dtype), torch.randint(0, classes, (B,))


class Classifier(nn.Module):
    """Cross entropy of `body(images)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(images), labels)


def vgg_bn(B: int = 4, image: int = 16, classes: int = 8, dropout: float = 0.0, norm: bool = True,
           dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []),
                   nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
    layers += [nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(inplace=True),
               nn.Dropout(dropout), nn.Linear(32, classes)]
    return Classifier(nn.Sequential(*layers)).to(dtype), Sample(pictures(B, image, classes, dtype))


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(before, after, 1, 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)), inplace=True)))
        y += self.norms[2](self.skip(x))
        return F.relu(y)


def resnet(B: int = 4, image: int = 16, classes: int = 8, dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    body = nn.Sequential(*stem, Residual(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
    return Classifier(body).to(dtype), Sample(pictures(B, image, classes, dtype))


def segmenter(B: int = 1, side: int = 40, classes: int = 3, up: str = "nearest",
              dtype: torch.dtype = torch.float32) -> Made:
    """A class for every pixel: down by a stride and a pool, depthwise with holes, `up` by neighbours or windows."""
    torch.manual_seed(0)
    aligned = {"mode": "bilinear", "align_corners": True}
    grow = nn.ConvTranspose2d(8, 8, 4, 2, 1) if up == "transposed" else nn.Upsample(scale_factor=2.0, **(
        aligned if up == "aligned" else {"mode": up}))
    layers = (nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.MaxPool2d(3, 1, 1),
              nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=4), nn.GroupNorm(2, 8), nn.SiLU(),
              nn.Conv2d(8, 8, 1), nn.AvgPool2d(3, 1, 1), grow, nn.Conv2d(8, 8, 3, 1, 1),
              nn.ReLU(), nn.Conv2d(8, classes, 3, 1, 1))
    sample = torch.randn(B, 3, side, side, dtype=dtype), torch.randint(0, classes, (B, side, side))
    return Classifier(nn.Sequential(*layers)).to(dtype), Sample(sample)


ZOO: dict[str, Callable[[], Made]] = {"gpt": gpt, "gpt2": gpt2, "llama": llama, "neox": neox,
                                      "phi3": phi3, "bert": bert, "t5": t5, "vit": vit,
                                      "vgg_bn": vgg_bn, "resnet": resnet, "mixture": mixture}


EXAMPLES: dict[str, dict[str, int]] = {
    "diffusion": {"layers": 1, "width": 16, "side": 8, "batch": 4},
    "unet": {"width": 8, "levels": 2, "side": 8, "batch": 4},
    "speech": {"layers": 1, "width": 16, "bands": 6, "frames": 16, "context": 8, "vocab": 24, "batch": 4},
    "two_towers": {"layers": 1, "width": 16, "side": 16, "context": 6, "vocab": 20, "batch": 8},
    "graph_network": {"layers": 2, "width": 8, "nodes": 18, "edges": 40},
    "recommender": {"tables": 3, "rows": 20, "width": 8, "hidden": 12, "batch": 8}}
"""Files of `examples/` with a factory of the same name, and the sizes that make it small."""


def example(name: str, dtype: torch.dtype = torch.float32, B: int = 0) -> Made:
    """A model of `examples/`, small, with its batch, of B rows if there is a B."""
    torch.manual_seed(0)
    path = Path(__file__).parent.parent.parent / "examples" / f"{name}.py"
    module = Factory.parse(f"{path}:{name}", EXAMPLES[name] | ({"batch": B} if B else {})).build()[0].to(dtype)
    batch = tuple(one.to(dtype) if one.is_floating_point() else one for one in sample_for(module).args)
    return module, Sample(batch)


def named(name: str, **options: Any) -> Made:
    """The model of a family: `gpt`, or `gpt-1` with one layer."""
    family, _, layers = name.partition("-")
    if family in EXAMPLES:
        return example(family, **options)
    made: Callable[..., Made] = partial(branching, family) if family in WAYS else globals()[family]
    return made(**options, **({"layers": int(layers)} if layers else {}))


class Regression(nn.Module):
    """Two layers and a squared error, with weights that are tied, frozen and idle, on uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale, self.idle = nn.Parameter(torch.ones(7, 1), requires_grad=False), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(self.up(x)) * self.scale
        return F.mse_loss(self.down(z) + F.linear(z, self.up.weight.t()), y)


def regression(dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    return Regression().to(dtype), Sample((torch.randn(5, 7, 6, dtype=dtype), torch.randn(5, 7, 6, dtype=dtype)))


class Tied(nn.Module):
    """Weights with several readers, some of them behind views."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(64, 32), nn.Parameter(torch.randn(32, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(torch.relu(self.table(ids) @ self.weight) @ self.weight.t())
        return (x @ self.weight.reshape(16, 64).reshape(32, 32) @ self.table.weight.t()).square().mean()


def tied() -> Made:
    """`Tied` with its batch."""
    return Tied(), Sample((tokens(8, 16, 64),))


class Turned(nn.Module):
    """One weight, read as it is, turned, and in a view that several ops read; an activation behind views too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        x = torch.tanh(x @ turned) + torch.sigmoid(x @ turned) * (x @ self.weight)
        y = x.reshape(-1, 4, 32).transpose(0, 1) * 2.0
        return (y @ self.head.t().reshape(64, 32).t()).square().mean()


def turned() -> Made:
    """`Turned` with its batch."""
    return Turned(), Sample((torch.randn(32, 32),))
