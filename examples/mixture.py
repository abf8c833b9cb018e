"""A mixture of experts like Mixtral 8x7B, on the meta device. Run: python examples/mixture.py [cluster.yaml]"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import autoddl

CLUSTER = "examples/clusters/h100-16x8.yaml"


class Mixture(nn.Module):
    """A MixtralForCausalLM that returns its loss alone. Its experts are one operator of the graph: tokens are sorted by
    expert when a step runs, whatever the router decides."""

    def __init__(self, config: MixtralConfig, batch: int, context: int) -> None:
        super().__init__()
        self.model: Any = MixtralForCausalLM(config)
        self.shape = (batch, context)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(self.shape, dtype=torch.int64, device="meta")
        return ids, ids


def mixture(layers: int = 32, width: int = 4096, hidden: int = 14336, experts: int = 8, batch: int = 64,
            context: int = 4096) -> Mixture:
    """By default Mixtral 8x7B."""
    config = MixtralConfig(vocab_size=32000, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
                           num_attention_heads=32, num_key_value_heads=8, num_local_experts=experts)
    with torch.device("meta"):
        return Mixture(config, batch, context).to(torch.bfloat16)


if __name__ == "__main__":
    print(autoddl.plan(mixture(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
