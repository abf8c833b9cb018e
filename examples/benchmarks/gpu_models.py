"""The models that a GPU is measured with, large enough to fill it, and small ones that try the script."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import Loss, Made, decoder, language, recurrent, vgg

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


def of_images(name: str, batch: int, pixels: int, **sizes: Any) -> Made:
    """A classifier of images of transformers, by the name of its configuration."""
    import transformers
    config = getattr(transformers, f"{name}Config")(image_size=pixels, **sizes)
    config.num_labels = 1000
    images = {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, 1000, (batch,))}
    return Loss(getattr(transformers, f"{name}ForImageClassification")(config)), Sample((), images)


def whisper(layers: int, width: int, heads: int, length: int, batch: int, frames: int) -> Made:
    """Speech to text: `frames` of 80 bands, halved by a convolution, against `length` tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    config = WhisperConfig(d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
                           decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
                           max_source_positions=frames // 2, use_cache=False, dropout=0.0)
    sound = torch.randn(batch, config.num_mel_bins, frames)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return Loss(WhisperForConditionalGeneration(config)), Sample((), {"input_features": sound, "labels": ids})


def gemma(layers: int, width: int, heads: int, length: int, batch: int, vocab: int, window: int) -> Made:
    """Gemma 3: five layers that see a window of keys for each that sees all."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    config = Gemma3TextConfig(vocab_size=vocab, hidden_size=width, intermediate_size=4 * width, sliding_window=window,
                              num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
                              head_dim=width // heads, use_cache=False)
    ids = torch.randint(0, vocab, (batch, length))
    return Loss(Gemma3ForCausalLM(config)), Sample((), {"input_ids": ids, "labels": ids.clone()})


def clip(layers: int, width: int, heads: int, length: int, batch: int, pixels: int) -> Made:
    """Pairs of images and texts, each against all others of the batch."""
    from transformers import CLIPConfig, CLIPModel
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
             "num_attention_heads": heads}
    config = CLIPConfig(text_config={**sizes, "max_position_embeddings": length, "vocab_size": 49408},
                        vision_config={**sizes, "image_size": pixels}, projection_dim=width)
    ids = torch.randint(0, 49400, (batch, length))
    return Loss(CLIPModel(config)), Sample((), {"input_ids": ids, "pixel_values": torch.randn(batch, 3, pixels, pixels),
                                                "return_loss": True})


def filled(name: str, layers: int, width: int, heads: int, length: int, batch: int, **extra: Any) -> Made:
    """An encoder of transformers that fills in tokens which were left out, without dropout."""
    import transformers
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        **{"intermediate_size": 4 * width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **extra})
    ids = torch.randint(3, config.vocab_size, (batch, length))
    return Loss(getattr(transformers, f"{name}ForMaskedLM")(config)), Sample((), {"input_ids": ids,
                                                                                 "labels": ids.clone()})


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
    "mixtral": lambda: language("Mixtral", 6, 1024, 3584, 16, 2048, 4, 32000, num_local_experts=8),
    "gemma3": lambda: gemma(12, 1024, 8, 2048, 4, 65536, 512),
    "whisper": lambda: whisper(12, 768, 12, 224, 16, 3000),
    "convnext": lambda: of_images("ConvNext", 64, 224),
    "swin": lambda: of_images("Swin", 64, 224),
    "lstm": lambda: recurrent("LSTM", 1024, 1024, 32000, 256, 64),
    "spotter": lambda: recurrent("GRU", 512, 512, 400, 400, 128, both=True),
    "llama3": lambda: language("Llama", 4, 4096, 14336, 32, 8192, 1, 128256, num_key_value_heads=8),
    "phi3": lambda: language("Phi3", 12, 2048, 8192, 32, 2048, 4, 32064),
    "olmo2": lambda: language("Olmo2", 12, 2048, 8192, 16, 2048, 4, 50304),
    "neox": lambda: language("GPTNeoX", 16, 2048, 8192, 16, 2048, 4, 50304),
    "bloom": lambda: language("Bloom", 24, 1024, 4096, 16, 1024, 8, 65536, n_layer=24, n_head=16),
    "qwen3moe": lambda: language("Qwen3Moe", 8, 1024, 3072, 16, 2048, 4, 32000, head_dim=64, num_experts=32,
                                 moe_intermediate_size=768, num_experts_per_tok=4),
    "modernbert": lambda: filled("ModernBert", 22, 768, 12, 1024, 16, intermediate_size=1152),
    "deberta": lambda: filled("DebertaV2", 12, 768, 12, 512, 16, relative_attention=True, pos_att_type=["p2c", "c2p"],
                              position_buckets=256),
    "dinov2": lambda: of_images("Dinov2", 32, 224, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
    "clip": lambda: clip(12, 768, 12, 77, 128, 224),
    "regnet": lambda: of_images("RegNet", 128, 224),
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
    "mixtral": lambda: language("Mixtral", 2, 64, 128, 4, 64, 4, 256, num_local_experts=4),
    "gemma3": lambda: gemma(2, 64, 2, 64, 4, 256, 16),
    "whisper": lambda: whisper(1, 64, 2, 16, 4, 64),
    "convnext": lambda: of_images("ConvNext", 4, 64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32]),
    "swin": lambda: of_images("Swin", 4, 64, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4),
    "lstm": lambda: recurrent("LSTM", 16, 16, 64, 8, 4),
    "spotter": lambda: recurrent("GRU", 16, 16, 10, 20, 4, both=True),
    "llama3": lambda: language("Llama", 2, 64, 128, 4, 64, 4, 256, num_key_value_heads=1),
    "phi3": lambda: language("Phi3", 2, 64, 128, 4, 64, 4, 256, pad_token_id=0),
    "olmo2": lambda: language("Olmo2", 2, 64, 128, 4, 64, 4, 256),
    "neox": lambda: language("GPTNeoX", 2, 64, 128, 4, 64, 4, 256),
    "bloom": lambda: language("Bloom", 2, 64, 128, 4, 64, 4, 256, n_layer=2, n_head=4),
    "qwen3moe": lambda: language("Qwen3Moe", 2, 64, 128, 4, 64, 4, 256, head_dim=16, num_experts=4,
                                 moe_intermediate_size=32, num_experts_per_tok=2),
    "modernbert": lambda: filled("ModernBert", 4, 64, 2, 64, 4, intermediate_size=96, vocab_size=50368),
    "deberta": lambda: filled("DebertaV2", 2, 64, 2, 32, 4, relative_attention=True, pos_att_type=["p2c", "c2p"],
                              position_buckets=8),
    "dinov2": lambda: of_images("Dinov2", 4, 56, hidden_size=48, num_hidden_layers=2, num_attention_heads=4),
    "clip": lambda: clip(2, 64, 2, 16, 4, 64),
    "regnet": lambda: of_images("RegNet", 4, 64, embedding_size=8, hidden_sizes=[24, 48, 48, 48], depths=[1, 1, 1, 1],
                                groups_width=24),
}


def made(name: str, small: bool, device: torch.device) -> Made:
    """The model with its weights on the device, and a batch there; both the same every time."""
    torch.manual_seed(0)
    with device:
        module, sample = (SMALL if small else MODELS)[name]()
    return module.to(device), sample
