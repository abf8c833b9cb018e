"""GPT-3 on the meta device, 8 of its 96 layers planned. Run: python examples/gpt3.py [cluster.yaml]"""

import sys

import torch
from gpt import GPT, gpt

import autoddl

CLUSTER = "examples/clusters/h100-16x8.yaml"


def gpt3_175b(layers: int = 96, batch: int = 64, context: int = 2048, vocab: int = 50257) -> GPT:
    """96 layers of width 12288 with 96 heads, in bfloat16, on the meta device."""
    with torch.device("meta"):
        return gpt(layers, 12288, 96, context, batch, vocab).to(torch.bfloat16)


if __name__ == "__main__":
    print(autoddl.plan(gpt3_175b(layers=8), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
