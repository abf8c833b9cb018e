"""VGG-16 on images. Run: python examples/vgg.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/a100-4x8.yaml"
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Thirteen convolutions, each stage halving the image, then three dense layers; forward returns the mean loss."""

    def __init__(self, batch: int, image: int, classes: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.batch, self.image, self.classes = batch, image, classes
        layers: list[nn.Module] = []
        before = 3
        for stage in STAGES:
            for after in stage:
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after) if norm else nn.Identity(),
                           nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(dropout),
                                        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4096, classes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images)), labels)

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        device = next(self.parameters()).device
        images = torch.zeros(self.batch, 3, self.image, self.image, device=device)
        return images, torch.zeros(self.batch, dtype=torch.int64, device=device)


def vgg16(batch: int = 128, image: int = 224, classes: int = 1000, norm: bool = False, dropout: float = 0.5) -> VGG:
    """138 million parameters; on the meta device, as a plan needs no weights."""
    with torch.device("meta"):
        return VGG(batch, image, classes, norm, dropout)


if __name__ == "__main__":
    print(autoddl.plan(vgg16(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
