"""Models small enough for two cores behind links of 200 Mbit/s: communication is a third to nine tenths of a step.

    gpt-512 gpt-8k gpt-32k   4 layers, width 128 (64 at 32k), 64 tokens, batch 32; the head has weights of its own
    gpt-deep                 8 layers, width 256, otherwise as gpt-512: weights, not activations, are much to send
    gpt-long                 8 layers, width 128, 256 tokens, batch 8: few rows, and much of activations is sent
    vgg                      VGG-16 at a quarter of its channels, 32 x 32 images, dense layers of 512, batch 64
    llama vit mixture        of Hugging Face's transformers: 2 layers of width 128, a mixture of 4 batched experts
    mixture-sent             a mixture of 4 layers and 8 experts, of which a token is sent to two

Module names are those that `megatron` cuts; a view leaves the number of heads open, for a rank
that has some of them. `made(name)` gives a module, the same in every process, and its batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.sample import Sample

__all__ = ["GPT", "NAMES", "VGG", "Block", "made"]

STAGES = ((16, 16), (32, 32), (64, 64, 64), (128, 128, 128), (128, 128, 128))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); query, key and value of a head stand side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.part = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm1(x))
        q, k, v = y.view(y.shape[0], y.shape[1], -1, 3 * self.part).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.reshape(y.shape[0], y.shape[1], -1))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Forward returns the mean loss of the next token."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class VGG(nn.Module):
    """Thirteen convolutions, each stage halving the image, then three dense layers; forward returns the mean loss."""

    def __init__(self, dense: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in STAGES:
            for after in stage:
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.fc1, self.fc2 = nn.Linear(before * 49, dense), nn.Linear(dense, dense)
        self.fc3 = nn.Linear(dense, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.fc2(F.relu(self.fc1(self.features(images)))))
        return F.cross_entropy(self.fc3(x), labels)


class Loss(nn.Module):
    """A Hugging Face model whose forward returns the loss alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def _gpt(vocab: int, width: int = 128) -> tuple[nn.Module, Sample]:
    return GPT(4, width, 8, 64, vocab), _tokens(32, 64, vocab)


def _tokens(batch: int, context: int, vocab: int) -> Sample:
    return Sample((torch.randint(0, vocab, (batch, context)), torch.randint(0, vocab, (batch, context))))


def _vgg() -> tuple[nn.Module, Sample]:
    model = VGG(512, 100)
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight)
    return model, Sample((torch.randn(64, 3, 32, 32), torch.randint(0, 100, (64,))))


DECODER: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
                           "num_attention_heads": 8, "num_key_value_heads": 8, "use_cache": False}


def _decoder(name: str, batch: int, **more: Any) -> tuple[nn.Module, Sample]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**DECODER | more)
    ids, labels = _tokens(batch, 64, 512).args
    return Loss(getattr(transformers, f"{name}ForCausalLM")(config)), Sample((), {"input_ids": ids, "labels": labels})


def _vit() -> tuple[nn.Module, Sample]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
                       image_size=32, patch_size=4)
    config.num_labels = 100
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))
    return Loss(ViTForImageClassification(config)), Sample((), {"pixel_values": images, "labels": labels})


_MAKERS: dict[str, Callable[[], tuple[nn.Module, Sample]]] = {
    "gpt-deep": lambda: (GPT(8, 256, 8, 64, 512), _tokens(32, 64, 512)),
    "gpt-long": lambda: (GPT(8, 128, 8, 256, 512), _tokens(8, 256, 512)),
    "gpt-512": lambda: _gpt(512), "gpt-8k": lambda: _gpt(8192), "gpt-32k": lambda: _gpt(32768, 64), "vgg": _vgg,
    "llama": lambda: _decoder("Llama", 32), "vit": _vit,
    "mixture": lambda: _decoder("Mixtral", 8, num_local_experts=4, experts_implementation="batched_mm"),
    "mixture-sent": lambda: _decoder("Mixtral", 16, num_local_experts=8, num_hidden_layers=4,
                                     experts_implementation="grouped_mm")}
NAMES = tuple(_MAKERS)


def made(name: str) -> tuple[nn.Module, Sample]:
    """The model and its batch."""
    torch.manual_seed(0)
    return _MAKERS[name]()
