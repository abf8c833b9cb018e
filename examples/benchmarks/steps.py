"""Predicted against measured steps of one process: python examples/benchmarks/steps.py [CLUSTER.yaml] [rounds]

Five families at three sizes each, and four recurrent models, forward and backward without the optimizer, float32, one
thread. The cluster file is of one device that `autoddl measure` timed; without one, this core is measured first.
Nothing is fitted to these models: the prediction is `plan(...).predicted.seconds` with the curves of kernels alone.
Measured is process CPU seconds, the 20th percentile over the rounds, each of which goes through all models: a step that
brings the model back into the caches, and steps that count. Wall-clock seconds stand beside it.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from gpt import gpt

import autoddl
from autoddl.calibrate.kernel_timing import low
from autoddl.calibrate.measure import measure
from autoddl.capture.sample import Sample
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch
from autoddl.runtime.parallelize import parallelize

CLUSTER = """name: one core
device: {name: core, kind: cpu, memory: 16 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s}}
levels: [{name: one, size: 1, bandwidth: 1 GB/s, latency: 1 us}]
"""
Made = tuple[nn.Module, Sample]


class Loss(nn.Module):
    """A Hugging Face model whose forward returns the loss alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def tokens(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length))


def decoder(layers: int, width: int, heads: int, length: int, batch: int, vocab: int) -> Made:
    """With GPT-2's own initialisation: from embeddings of variance one, which are the head too, come gradients below
    the least normal number, of which a product takes ten times as long."""
    module = gpt(layers=layers, width=width, heads=heads, context=length, batch=batch, vocab=vocab)
    nn.init.normal_(module.tokens.weight, std=0.02)
    return module, Sample((tokens(batch, length, vocab), tokens(batch, length, vocab)))


def language(name: str, layers: int, width: int, hidden: int, heads: int, length: int, batch: int, vocab: int,
             **extra: Any) -> Made:
    """A decoder of transformers, with half as many heads of keys as of queries unless `extra` says how many."""
    import transformers
    config = getattr(transformers, f"{name}Config")(**{
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": length,
        "use_cache": False, **extra})
    ids = {"input_ids": tokens(batch, length, vocab), "labels": tokens(batch, length, vocab)}
    return Loss(getattr(transformers, f"{name}ForCausalLM")(config)), Sample((), ids)


def mixture(*sizes: int, experts: int) -> Made:
    return language("Mixtral", *sizes, num_local_experts=experts, experts_implementation="batched_mm")


def vit(layers: int, width: int, heads: int, image: int, patch: int, batch: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
                       num_attention_heads=heads, image_size=image, patch_size=patch)
    config.num_labels = 100
    images = {"pixel_values": torch.randn(batch, 3, image, image), "labels": torch.randint(0, 100, (batch,))}
    return Loss(ViTForImageClassification(config)), Sample((), images)


class VGG(nn.Module):
    """Stages of convolutions with batch norm, each halving the image, then three dense layers."""

    def __init__(self, stages: tuple[tuple[int, ...], ...], hidden: int, image: int) -> None:
        super().__init__()
        layers, before, side = list[nn.Module](), 3, image // 2 ** len(stages)
        for stage in stages:
            for after in stage:
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(before * side * side, hidden), nn.ReLU(), nn.Linear(hidden, hidden),
                                        nn.ReLU(), nn.Linear(hidden, 100))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images)), labels)


def vgg(stages: tuple[tuple[int, ...], ...], hidden: int, image: int, batch: int) -> Made:
    return VGG(stages, hidden, image), Sample((torch.randn(batch, 3, image, image), torch.randint(0, 100, (batch,))))


class Recurrent(nn.Module):
    """Two recurrent layers between an embedding and a head, or between convolutions of spectra and classes."""

    def __init__(self, kind: str, width: int, hidden: int, classes: int, both: bool) -> None:
        super().__init__()
        self.first: nn.Module = nn.Embedding(classes, width) if not both else nn.Sequential(
            nn.Conv1d(80, width, 5, stride=2, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU())
        self.layers = getattr(nn, kind)(width, hidden, 2, batch_first=True, bidirectional=both)
        self.head, self.both = nn.Linear((1 + both) * hidden, classes), both

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = self.first(x)
        out = self.head(self.layers(found.transpose(1, 2) if self.both else found)[0])
        return F.cross_entropy(out.mean(1) if self.both else out.flatten(0, 1), labels.flatten())


def recurrent(kind: str, width: int, hidden: int, classes: int, steps: int, batch: int, both: bool = False) -> Made:
    x = torch.randn(batch, 80, steps) if both else torch.randint(0, classes, (batch, steps))
    labels = torch.randint(0, classes, (batch,) if both else (batch, steps))
    return Recurrent(kind, width, hidden, classes, both), Sample((x, labels))


MODELS: dict[str, Callable[[], Made]] = {
    "gpt small": lambda: decoder(2, 128, 4, 64, 4, 1024),
    "gpt medium": lambda: decoder(4, 256, 8, 128, 4, 1024),
    "gpt large": lambda: decoder(4, 512, 8, 256, 4, 4096),
    "llama small": lambda: language("Llama", 2, 128, 344, 4, 64, 4, 1024),
    "llama medium": lambda: language("Llama", 4, 256, 688, 8, 128, 4, 1024),
    "llama large": lambda: language("Llama", 4, 512, 1376, 8, 256, 4, 4096),
    "vgg small": lambda: vgg(((16,), (32,), (64, 64)), 256, 32, 8),
    "vgg medium": lambda: vgg(((32,), (64,), (128, 128), (256, 256)), 512, 32, 16),
    "vgg large": lambda: vgg(((64,), (128,), (256, 256), (512, 512), (512, 512)), 1024, 64, 8),
    "vit small": lambda: vit(2, 96, 3, 32, 4, 8),
    "vit medium": lambda: vit(4, 192, 3, 64, 8, 8),
    "vit large": lambda: vit(6, 384, 6, 96, 8, 8),
    "mixture small": lambda: mixture(2, 64, 128, 4, 32, 4, 1024, experts=4),
    "mixture medium": lambda: mixture(2, 128, 256, 4, 64, 4, 1024, experts=8),
    "mixture large": lambda: mixture(4, 192, 384, 4, 64, 4, 1024, experts=8),
    "gru both ways": lambda: recurrent("GRU", 64, 128, 50, 200, 16, both=True),
    "gru": lambda: recurrent("GRU", 256, 256, 200, 50, 8),
    "lstm": lambda: recurrent("LSTM", 128, 128, 500, 64, 32),
    "lstm large": lambda: recurrent("LSTM", 512, 512, 100, 32, 64),
}


def compared(path: Path, rounds: int, names: list[str]) -> None:
    """One process: plan all, then step them in turn."""
    torch.set_num_threads(1)
    cluster, ready = load_cluster(path), []
    for name in names:
        torch.manual_seed(0)
        model, sample = MODELS[name]()
        plan = autoddl.plan(model, cluster, sample, mesh=f"{cluster.levels[0].name}=1", workers=1)
        ready.append((name, plan.predicted.seconds, parallelize(model, plan, sample), sample))
    cpu, wall = {name: list[float]() for name in names}, {name: list[float]() for name in names}
    for turn in range(rounds + 1):
        for name, predicted, parallel, sample in ready:
            for repeat in range(2 + int(0.05 / predicted)):
                for parameter in parallel.parameters():
                    parameter.grad = None
                start, began = time.process_time(), time.perf_counter()
                parallel.step(sample)
                if turn and repeat:
                    cpu[name].append(time.process_time() - start)
                    wall[name].append(time.perf_counter() - began)
    errors = []
    for name, predicted, _, _ in ready:
        errors.append(predicted / low(cpu[name]) - 1)
        print(f"{name:15} predicted {predicted * 1e3:8.2f} ms   measured {low(cpu[name]) * 1e3:8.2f} ms, median "
              f"{statistics.median(cpu[name]) * 1e3:8.2f}, wall {low(wall[name]) * 1e3:8.2f}   {errors[-1]:+7.1%}")
    absolute = [abs(error) for error in errors]
    print(f"error: median {statistics.median(absolute):.1%}, worst {max(absolute):.1%}; {rounds} rounds, load "
          f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}", flush=True)


def main(arguments: list[str]) -> None:
    rounds = int(arguments[1]) if len(arguments) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments[0]) if arguments else Path(folder, "core.yaml")
        if not arguments:
            path.write_text(CLUSTER, encoding="utf-8")
            measure(path)
        launch(1, [sys.executable, __file__, "--rank", str(path), str(rounds), *arguments[2:]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        compared(Path(sys.argv[2]), int(sys.argv[3]), [n for n in MODELS if all(w in n for w in sys.argv[4:])])
    else:
        main(sys.argv[1:])
