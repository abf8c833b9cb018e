"""A ResNet trained as torchvision's reference scripts train it, on images that are drawn.

Run: python examples/conversions/resnet_plain.py --epochs 2
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))
        return found


def train_one_epoch(model: Any, criterion: Any, optimizer: Any, loader: Any, device: torch.device, args: Any
                    ) -> list[float]:
    model.train()
    losses = []
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model: Any, criterion: Any, loader: Any, device: torch.device) -> tuple[float, float]:
    model.eval()
    total, right, count = 0.0, 0, 0
    with torch.inference_mode():
        for image, target in loader:
            image, target = image.to(device), target.to(device)
            output = model(image)
            loss = criterion(output, target)
            total += loss.item() * len(target)
            right += int((output.argmax(1) == target).sum())
            count += len(target)
    return total / count, right / count


def load_data(args: argparse.Namespace) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.images, 3, 12, 12, generator=generator)
    labels = images.mean((2, 3)).argmax(1)
    train, test = TensorDataset(images, labels), TensorDataset(images[::2], labels[::2])
    return DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size)


def main(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(0)
    loader, loader_test = load_data(args)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = ResNet(10, args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    found = []
    for epoch in range(args.epochs):
        losses = train_one_epoch(model, criterion, optimizer, loader, device, args)
        scheduler.step()
        loss, accuracy = evaluate(model, criterion, loader_test, device)
        found += [*losses, loss, accuracy]
        print(f"epoch {epoch}  train {losses[-1]:.4f}  test {loss:.4f}  accuracy {accuracy:.3f}")
    if args.output:
        Path(args.output).write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a ResNet")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=88)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--output", default="")
    main(parser.parse_args())
