"""Two encoders and a contrastive loss over the whole batch. Run: python examples/two_towers.py [cluster.yaml]"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class TwoTowers(nn.Module):
    """Images against texts, as CLIP: every pair of the global batch is scored, whatever splits the batch.

    Forward returns the mean of both cross entropies: of the text for an image, and of the image for a text.
    """

    def __init__(self, layers: int, width: int, heads: int, side: int, context: int, vocab: int, batch: int) -> None:
        super().__init__()
        self.images, self.texts, self.vocab = (batch, 3, side, side), (batch, context), vocab

        def encoder() -> nn.TransformerEncoder:
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu",
                                               batch_first=True, norm_first=True)
            return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.patch, self.tokens = nn.Conv2d(3, width, 8, 8), nn.Embedding(vocab, width)
        self.image_places = nn.Parameter(torch.zeros((side // 8) ** 2, width))
        self.text_places = nn.Parameter(torch.zeros(context, width))
        self.image_tower, self.text_tower = encoder(), encoder()
        self.image_head, self.text_head = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.full((), math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        x = self.image_tower(self.patch(images).flatten(2).transpose(1, 2) + self.image_places).mean(dim=1)
        y = self.text_tower(self.tokens(texts) + self.text_places).mean(dim=1)
        x, y = F.normalize(self.image_head(x), dim=-1), F.normalize(self.text_head(y), dim=-1)
        scores = self.scale.exp() * (x @ y.t())
        pairs = torch.arange(scores.shape[0], device=scores.device)
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.images, device="cpu"), torch.randint(0, self.vocab, self.texts, device="cpu")


def two_towers(layers: int = 2, width: int = 64, heads: int = 4, side: int = 32, context: int = 12, vocab: int = 100,
               batch: int = 16) -> TwoTowers:
    return TwoTowers(layers, width, heads, side, context, vocab, batch)


if __name__ == "__main__":
    print(autoddl.plan(two_towers(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
