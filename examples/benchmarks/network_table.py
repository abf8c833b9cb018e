"""Communication's share of a step against published shares: python examples/benchmarks/network_table.py [CLUSTER.yaml]

Published: data parallel training by Megatron-LM on servers of two A100-PCIe-40GB, one 100 Gb/s InfiniBand port a server
(TCP: 10 Gb/s Ethernet), a global batch of 16 on 2, 4 and 8 GPUs. Predicted: `autoddl network --no-overlap`, float16
gradients reduced once after backward, as Megatron-LM's own data parallelism does. The efficiencies of tcp, ipoib and
rdma-host are the bandwidths that the publication says they reach (9, 20, 60 Gb/s); that of shm is fitted to the two
shares on 2 GPUs.
"""

import sys
from statistics import fmean

from autoddl.cost_models import load_cluster
from autoddl.explain.communication_share import Network, shares
from autoddl.explain.data_parallel_work import traced
from autoddl.validation.share_models import MODELS

CLUSTER, RANKS = "examples/clusters/two-a100-pcie.yaml", (2, 4, 8)
PUBLISHED = {
    "t5-large": {"tcp=Ethernet-10G": (0.25, 0.83, 0.90), "ipoib": (0.24, 0.74, 0.78), "rdma-host": (0.24, 0.42, 0.47)},
    "gpt2-medium": {"tcp=Ethernet-10G": (0.24, 0.86, 0.92), "ipoib": (0.24, 0.78, 0.84),
                    "rdma-host": (0.24, 0.48, 0.54)},
}


def main(path: str) -> None:
    cluster, all_differences, across = load_cluster(path), list[float](), list[float]()
    print(f"{'model':12} {'network':18}" + "".join(f"{f'<{n},16>':>22}" for n in RANKS) + "    published, predicted")
    for model, rows in PUBLISHED.items():
        one = traced(*MODELS[model](16))
        found = shares(one, cluster, [Network.parse(text) for text in rows], RANKS, overlap=False)
        for i, (network, measured) in enumerate(rows.items()):
            cells = [cell.share for cell in found[i * len(RANKS):(i + 1) * len(RANKS)]]
            print(f"{model:12} {network:18}" + "".join(f"{m:13.2f}, {p:.2f}   " for m, p in
                                                       zip(measured, cells, strict=True)))
            differences = [abs(m - p) for m, p in zip(measured, cells, strict=True)]
            all_differences += differences
            across += differences[1:]
    print(f"mean absolute difference {fmean(all_differences):.3f}, largest {max(all_differences):.3f}; "
          f"of 4 and 8 GPUs alone, to which nothing was fitted, {fmean(across):.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else CLUSTER)
