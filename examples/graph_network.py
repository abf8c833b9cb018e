"""Messages along the edges of graphs, added up at their ends. Run: python examples/graph_network.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Messages(nn.Module):
    """x + mlp(x, sum of the messages of a node's incoming edges)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        pair = torch.cat([x.index_select(0, source), x.index_select(0, target)], dim=1)
        sums = torch.zeros_like(x).index_add(0, target, F.relu(self.message(pair)))
        return torch.add(x, self.norm(F.relu(self.update(torch.cat([x, sums], dim=1)))))


class GraphNetwork(nn.Module):
    """Classifies the nodes of a graph; forward returns the mean loss of the nodes."""

    def __init__(self, layers: int, width: int, features: int, classes: int, nodes: int, edges: int) -> None:
        super().__init__()
        self.sizes = nodes, edges, features, classes
        self.embed, self.head = nn.Linear(features, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(Messages(width) for _ in range(layers))

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return F.cross_entropy(self.head(x), labels)

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        nodes, edges, features, classes = self.sizes
        return (torch.randn(nodes, features, device="cpu"), torch.randint(0, nodes, (edges,), device="cpu"),
                torch.randint(0, nodes, (edges,), device="cpu"), torch.randint(0, classes, (nodes,), device="cpu"))


def graph_network(layers: int = 3, width: int = 64, features: int = 16, classes: int = 4, nodes: int = 96,
                  edges: int = 400) -> GraphNetwork:
    return GraphNetwork(layers, width, features, classes, nodes, edges)


if __name__ == "__main__":
    print(autoddl.plan(graph_network(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
