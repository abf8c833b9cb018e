"""Llama 3 of Hugging Face's transformers, on the meta device. Run: python examples/llama.py [cluster.yaml]"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoddl

CLUSTER = "examples/clusters/h100-16x8.yaml"


class Llama(nn.Module):
    """A LlamaForCausalLM that returns its loss alone."""

    def __init__(self, config: LlamaConfig, batch: int, context: int) -> None:
        super().__init__()
        self.model: Any = LlamaForCausalLM(config)
        self.shape = (batch, context)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(self.shape, dtype=torch.int64, device="meta")
        return ids, ids


def llama3(layers: int, width: int, hidden: int, heads: int, batch: int, context: int) -> Llama:
    """The published Llama 3 family: 8 key-value heads, 128256 tokens, rotary base 500000; bfloat16."""
    config = LlamaConfig(vocab_size=128256, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192,
                         rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device("meta"):
        return Llama(config, batch, context).to(torch.bfloat16)


def llama3_8b(batch: int = 16, context: int = 8192, layers: int = 32) -> Llama:
    return llama3(layers, 4096, 14336, 32, batch, context)


def llama3_70b(batch: int = 16, context: int = 8192, layers: int = 80) -> Llama:
    return llama3(layers, 8192, 28672, 64, batch, context)


if __name__ == "__main__":
    print(autoddl.plan(llama3_8b(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
