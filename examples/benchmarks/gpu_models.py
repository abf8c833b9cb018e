"""The models that a GPU is measured with, large enough to fill it, and small ones that try the script."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import Loss, Made, decoder, language, vgg

from autoddl.capture.sample import Sample


def vit_base(batch: int, layers: int = 12, width: int = 768) -> Made:
    from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width)
    config.num_labels = 1000
    images = {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(0, 1000, (batch,))}
    return Loss(ViTForImageClassification(config)), Sample((), images)


def bert(layers: int, width: int, heads: int, length: int, batch: int) -> Made:
    from transformers import BertConfig, BertForMaskedLM
    config = BertConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                        intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return Loss(BertForMaskedLM(config)), Sample((), {"input_ids": ids, "labels": ids.clone()})


def resnet(batch: int, pixels: int, **sizes: Any) -> Made:
    """ResNet-50, or one of other sizes."""
    from transformers import ResNetConfig, ResNetForImageClassification
    config = ResNetConfig(**sizes)
    config.num_labels = 1000
    images = {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, 1000, (batch,))}
    return Loss(ResNetForImageClassification(config)), Sample((), images)


def t5(layers: int, width: int, heads: int, length: int, batch: int) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration
    config = T5Config(d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=heads, dropout_rate=0.0,
                      use_cache=False)
    config.decoder_start_token_id = config.pad_token_id = 0
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return Loss(T5ForConditionalGeneration(config)), Sample((), {"input_ids": ids, "labels": ids.clone()})


VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: decoder(12, 768, 12, 1024, 8, 50304),
    "vit": lambda: vit_base(64),
    "vgg16": lambda: vgg(VGG16, 4096, 224, 64),
    "llama": lambda: language("Llama", 16, 2048, 8192, 32, 2048, 4, 32000),
    "bert": lambda: bert(24, 1024, 16, 512, 16),
    "resnet50": lambda: resnet(128, 224),
    "qwen3": lambda: language("Qwen3", 28, 1024, 3072, 16, 2048, 4, 151936, head_dim=128),
    "t5": lambda: t5(12, 768, 12, 512, 16),
}
SMALL: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: decoder(2, 64, 4, 64, 4, 256),
    "vit": lambda: vit_base(4, 1, 48),
    "vgg16": lambda: vgg(((8,), (16,)), 32, 32, 4),
    "llama": lambda: language("Llama", 2, 64, 128, 4, 64, 4, 256),
    "bert": lambda: bert(1, 64, 2, 32, 4),
    "resnet50": lambda: resnet(4, 64, depths=[1, 1], hidden_sizes=[16, 32], embedding_size=8),
    "qwen3": lambda: language("Qwen3", 2, 64, 128, 4, 64, 4, 256, head_dim=32),
    "t5": lambda: t5(1, 128, 2, 32, 4),
}


def made(name: str, small: bool, device: torch.device) -> Made:
    """The model with its weights on the device, and a batch there; both the same every time."""
    torch.manual_seed(0)
    with device:
        module, sample = (SMALL if small else MODELS)[name]()
    return module.to(device), sample
