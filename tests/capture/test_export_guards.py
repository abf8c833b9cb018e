"""What a captured graph would not show is refused, or traced as what it means; recurrent layers that draw nothing are
captured."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from autoddl.capture.capture import capture
from autoddl.capture.rewrites.export_passes import link_users
from autoddl.core.errors import CaptureError


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return -upstream


class Strange(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.shift = kind, nn.Linear(4, 4), nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        match self.kind:
            case "reversed":
                h = Reversed.apply(h)  # type: ignore[no-untyped-call]
            case "hook":
                h.register_hook(lambda gradient: gradient * 0.5)
            case "checkpoint":
                h = checkpoint(self.linear, h, use_reentrant=True)
            case "weight":
                self.linear.weight.data.clamp_(-0.1, 0.1)
            case "buffer":
                self.shift.data = self.shift + 1
            case "penalty":
                (found,) = torch.autograd.grad(h.sum(), self.linear.weight, create_graph=True)
                h = h * found.norm()
            case "vmap":
                h = torch.vmap(self.linear)(h)
            case "read":
                h = h - h.data * 0.5
            case "cast":
                h = self.linear.to(torch.bfloat16)(h.bfloat16()).float()
            case "outside":
                h = h * torch.from_numpy(x.numpy())
            case "packed":
                h = pack_padded_sequence(h[None], torch.tensor([3]), batch_first=True).data
            case "frozen":
                h = h + Reversed.apply(x)  # type: ignore[no-untyped-call]
        loss: Tensor = (h + self.shift).square().mean()
        return loss


@pytest.mark.parametrize(("kind", "says"), [
    ("hook", r"test_export_guards\.py:\d+: h\.register_hook.*a hook on a gradient"),
    ("checkpoint", "use_reentrant=False"), ("weight", "writes into its parameter"),
    ("buffer", r"sets the \.data of a tensor"), ("penalty", "takes gradients itself"),
    ("cast", r"self\.linear\.to.*casts it to torch\.bfloat16, for good: do that before planning"),
    ("outside", r"x\.numpy\(\).* takes values out"), ("packed", r"pack_padded.* give the layer the padded rows"),
    ("vmap", "no operator")])
def test_what_a_graph_does_not_show_is_refused(kind: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Strange(kind), torch.randn(4, 4))
    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(torch.autograd.grad(Reversed.apply(x := torch.ones(1, requires_grad=True)), x)[0], -x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["read", "frozen", "reversed"])
def test_what_means_the_same_is_captured(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Strange(kind), torch.randn(4, 4)
    captured = capture(model, x)
    own = dict(model.named_parameters())
    leaves = [own.get(t.fqn, model.shift if t.fqn == "shift" else x) for t in captured.graph.tensors
              if t.kind.name in ("PARAMETER", "BUFFER", "INPUT")]
    found = torch.autograd.grad(captured.program(*leaves)[0], tuple(own.values()))
    for ours, theirs in zip(found, torch.autograd.grad(model(x), tuple(own.values())), strict=True):
        torch.testing.assert_close(ours, theirs)


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 3, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x)[0].square().mean()
        return loss


def test_a_reader_that_an_exported_graph_forgets_is_found() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    graph.call_function(torch.exp, (x,))
    graph.output(y)
    x.users.clear()
    module = fx.GraphModule(nn.Module(), graph)
    link_users(module)
    module.graph.eliminate_dead_code()
    assert [str(node) for node in module.graph.nodes] == ["x", "neg", "output"]


def test_running_averages_of_instances_are_refused() -> None:
    class Averaged(nn.Module):
        def __init__(self, track: bool) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=track)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.norm(x).square().mean()
            return loss

    x = torch.randn(2, 4, 5)
    assert capture(Averaged(False), x).graph.ops
    with pytest.raises(CaptureError, match="keeps running averages"):
        capture(Averaged(True), x)
    assert capture(Averaged(True).eval(), x).graph.ops


def test_recurrent_layers_come_apart_only_where_they_draw() -> None:
    x = torch.randn(2, 5, 4)
    names = [[op.target for op in capture(Recurrent(p), x).graph.ops] for p in (0.0, 0.5)]
    assert [one.count("aten.lstm.input") for one in names] == [1, 2]
    assert [one.count("autoddl.dropout") for one in names] == [0, 1]
