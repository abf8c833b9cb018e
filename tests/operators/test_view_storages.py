"""Which views look at a storage as it is, and which reshapes copy."""

import torch
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.operators.footprints.view_storages import is_moved, is_plain, moved_reads
from autoddl.operators.work import VIEWS, base


def test_views_that_look_at_a_storage_under_any_layout() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:  # [2, 4, 8]
            divided = self.layer(x).view(2, 4, 3, 8)
            turned = divided.transpose(1, 2)
            joined = turned.reshape(2, 3, 32)
            found: Tensor = (joined.reshape(6, 32) * turned.sigmoid().transpose(1, 2).reshape(6, 32)).sum()
            return found

    graph = capture(Views(), (torch.randn(2, 4, 8),)).graph
    views = [(i, op) for i, op in enumerate(graph.ops) if base(op) in VIEWS]
    plain = [is_plain(op, graph) for _, op in views]
    assert plain == [True, True, False, False, True, False], "a view that joins dims may copy"
    moved = moved_reads(graph, True)
    assert dict(moved) == {views[2][0]: (0, 2, 1, 3)}, "sigmoid writes in the order of what it reads, turned"
    assert is_moved((2, 3, 4, 8), (0, 2, 1, 3), (2, 3, 32))
    assert not is_moved((2, 1, 4, 8), (0, 2, 1, 3), (2, 1, 32)), "of one head nothing moves"
