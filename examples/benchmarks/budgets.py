"""Plans under falling budgets: seconds, bound, gap and peak, and whether a smaller budget ever does better.

    python examples/benchmarks/budgets.py [resnet | llama | gpt2 | vgg]

ResNet-50 of transformers on four devices of 16 GB at 50 GB/s; the others of `examples` on clusters of `examples`.
A plan of a larger budget whose peak is within a smaller one bounds what the smaller one may take: `monotone` says so.
"""

import sys
import time
from pathlib import Path

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

Case = tuple[nn.Module, object, Cluster, str | None, tuple[str, ...]]
"""(model, sample, cluster, mesh, budgets)."""


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


def case(name: str) -> Case:
    """The case of a name."""
    if name == "resnet":
        with torch.device("meta"):
            sample = {"pixel_values": torch.empty(640, 3, 224, 224), "labels": torch.empty(640, dtype=torch.int64)}
            return Classified(), sample, parse_cluster(FOUR, "four"), "node=4", (
                "24 GB", "20 GB", "16 GB", "14.5 GB", "14.3 GB", "14 GB")
    clusters = EXAMPLES / "clusters"
    if name == "llama":
        import llama

        return llama.llama3_8b(batch=64), None, load_cluster(clusters / "h100-8x8.yaml"), "net=8,node=8", (
            "120 GB", "100 GB", "80 GB", "70 GB", "67 GB", "60 GB")
    if name == "gpt2":
        import gpt

        return gpt.gpt2_small(), None, load_cluster(clusters / "a100-4x8.yaml"), None, (
            "80 GB", "8 GB", "4 GB", "2 GB", "1 GB", "0.5 GB")
    import vgg

    return vgg.vgg16(), None, load_cluster(clusters / "a100-4x8.yaml"), None, (
        "80 GB", "4 GB", "2 GB", "1.5 GB", "1 GB", "0.5 GB")


def main(names: list[str]) -> None:
    """Print the table of every name."""
    print("model   budget      seconds     bound       gap      peak GB  wall s  monotone")
    for name in names or ["resnet", "llama", "gpt2", "vgg"]:
        model, sample, cluster, mesh, budgets = case(name)
        before: list[autoddl.Plan] = []
        for budget in budgets:
            start = time.perf_counter()
            try:
                plan = autoddl.plan(model, cluster, sample, mesh=mesh, budget=budget)
            except Infeasible as error:
                print(f"{name:7} {budget:8}  {error}")
                continue
            fits = [p.predicted.seconds for p in before if p.predicted.peak_bytes <= plan.budget]
            good = all(plan.bound <= s * (1 + 1e-9) and plan.predicted.seconds * (1 - plan.gap) <= s * (1 + 1e-9)
                       for s in fits)
            before.append(plan)
            print(f"{name:7} {budget:8} {plan.predicted.seconds:10.6f} {plan.bound:10.6f} {plan.gap:9.4%} "
                  f"{plan.predicted.peak_bytes / 1e9:9.3f} {time.perf_counter() - start:7.1f}  {good}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
