"""Plans under falling budgets: seconds, bound, gap and peak, and whether a smaller budget ever does better.

    python examples/benchmarks/budgets.py [resnet | llama | gpt2 | vgg | t5 | mixture | bert | opt | vit]
                                          [resnet@14.3GB ...] [bert@0.93 ...] [--recompute POLICY]

ResNet-50 of transformers on four devices at 50 GB/s; the others on clusters of `examples`. BERT and OPT (weights of the
head tied to the embedding) and ViT have six layers and the ordinary servers of `two-racks-10g.yaml`. Budgets are shares
of the peak of the plan without one; behind `@` stands one, as bytes or as a share.
A plan of a larger budget whose peak is within a smaller one bounds what the smaller one may take: `monotone` says so.
"""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.cost_models import Cluster, load_cluster, parse_cluster

EXAMPLES = Path(__file__).parent.parent
sys.path.insert(0, str(EXAMPLES))

FOUR = """
name: four
device: {name: V, kind: gpu, memory: 16 GB, bandwidth: 900 GB/s, peak: {float32: 15 TFLOP/s}}
levels:
  - {name: node, size: 4, bandwidth: 50 GB/s, latency: 5 us}
"""

Case = tuple[nn.Module, object, Cluster, str]
"""(model, sample, cluster, mesh)."""

NAMES = ("resnet", "vgg", "gpt2", "llama", "t5", "mixture")

PARTS = (0.98, 0.9, 0.8, 0.7, 0.55, 0.4)
"""Budgets, as shares of the peak of the plan without one."""


class Classified(nn.Module):
    """ResNet-50 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetForImageClassification
        from transformers.models.resnet.configuration_resnet import ResNetConfig

        self.model = ResNetForImageClassification(ResNetConfig(num_labels=1000))  # type: ignore[call-arg]

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


class Labelled(nn.Module):
    """A model of transformers with the loss of its labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(labels=labels, **inputs).loss
        return loss


def six_layers(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """(BERT, OPT or ViT of transformers with six layers, its batch)."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        OPTConfig,
        OPTForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    if name == "vit":
        model = ViTForImageClassification(ViTConfig(num_hidden_layers=6, num_labels=1000))  # type: ignore[call-arg]
        return Labelled(model), {"pixel_values": torch.empty(64, 3, 224, 224),
                                 "labels": torch.empty(64, dtype=torch.int64)}
    ids = torch.empty(64, 128, dtype=torch.int64)
    if name == "bert":
        return Labelled(BertForMaskedLM(BertConfig(num_hidden_layers=6))), {"input_ids": ids, "labels": ids}
    return Labelled(OPTForCausalLM(OPTConfig(num_hidden_layers=6))), {"input_ids": ids, "labels": ids}


class Translated(nn.Module):
    """T5-base with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12,
                                                         decoder_start_token_id=0))  # type: ignore[call-arg]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def case(name: str) -> Case:
    """The case of a name."""
    clusters = EXAMPLES / "clusters"
    a100 = load_cluster(clusters / "a100-4x8.yaml")
    match name:
        case "resnet":
            with torch.device("meta"):
                sample = {"pixel_values": torch.empty(640, 3, 224, 224), "labels": torch.empty(640, dtype=torch.int64)}
                return Classified(), sample, parse_cluster(FOUR, "four"), "node=4"
        case "llama":
            import llama

            return llama.llama3_8b(batch=64), None, load_cluster(clusters / "h100-8x8.yaml"), "net=8,node=8"
        case "gpt2":
            import gpt

            return gpt.gpt2_small(), None, a100, "net=4,node=8"
        case "t5":
            with torch.device("meta"):
                ids = torch.empty(64, 512, dtype=torch.int64)
                return Translated(), {"input_ids": ids, "labels": ids}, a100, "net=4,node=8"
        case "mixture":
            import mixture

            return mixture.mixture(), None, a100, "net=4,node=8"
        case "bert" | "opt" | "vit":
            with torch.device("meta"):
                return *six_layers(name), load_cluster(clusters / "two-racks-10g.yaml"), "hall=2,rack=4"
    import vgg

    return vgg.vgg16(), None, a100, "net=4,node=8"


def _parts(given: str) -> tuple[float | str, ...]:
    """One budget: a share of the free peak if it is a number, else bytes with their unit."""
    try:
        return (float(given),)
    except ValueError:
        return (given,)


def cpu_seconds() -> float:
    """CPU seconds of this process and those that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main(names: list[str], recompute: str) -> None:
    """Print the table of every name, then the median and the worst gap and share of time."""
    print("model    budget GB    seconds      bound       gap   peak GB   CPU s  monotone")
    gaps, shares = list[float](), list[float]()
    for word in names or NAMES:
        name, _, given = word.partition("@")
        model, sample, cluster, mesh = case(name)
        before, free = list[autoddl.Plan](), 0.0
        for part in (None, *(_parts(given) if given else PARTS)):
            start, budget = cpu_seconds(), part if isinstance(part, str) else "1000 TB"
            if isinstance(part, float):
                budget = f"{part * before[0].predicted.peak_bytes:.0f} B"
            try:
                plan = autoddl.plan(model, cluster, sample, mesh=mesh, budget=budget, workers=1,
                                    recompute=(recompute,))
            except Infeasible as error:
                print(f"{name:8} {budget}: {error}", flush=True)
                continue
            took = cpu_seconds() - start
            fits = [p.predicted.seconds for p in before if p.predicted.peak_bytes <= plan.budget]
            good = all(plan.bound <= s * (1 + 1e-9) and plan.predicted.seconds * (1 - plan.gap) <= s * (1 + 1e-9)
                       for s in fits)
            before.append(plan)
            if part is None:
                free = took
            else:
                gaps, shares = [*gaps, plan.gap], [*shares, took / free]
            print(f"{name:8} {plan.budget / 1e9:9.3f} {plan.predicted.seconds:10.6f} {plan.bound:10.6f} "
                  f"{plan.gap:9.4%} {plan.predicted.peak_bytes / 1e9:9.3f} {took:7.1f}  {good}", flush=True)
    if not gaps:
        return
    print(f"gap: median {median(gaps):.4%}, worst {max(gaps):.4%}; time, of that without a budget: median "
          f"{median(shares):.2f}, worst {max(shares):.2f}")


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--recompute", default="none")
    given = parser.parse_args()
    main(given.names, given.recompute)
