"""Runs the steps of a model as one CUDA graph: the host starts one graph, not thousands of kernels.

    step 1      runs as it is, on a stream of its own, so that libraries allocate what they need
    step 2      is captured, which runs nothing, and replayed
    then        the batch is copied to where the graph reads it, and the graph is replayed

A graph fixes the memory of all that it reads and writes. So a gradient lies in the same memory in every step. After a
step `.grad` has that step's values only, and who wants to keep them copies them. Gradients that were not zeroed before
a step are added to it, as without a graph. What Python does in a step is done once, at the capture. So a model that
draws random numbers, whose seeds Python makes, is refused.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from autoddl.core.codecs import CODECS
from autoddl.core.errors import InputError, MachineError
from autoddl.core.graph import Graph
from autoddl.operators.flexible import FLEXIBLE
from autoddl.operators.kernels.custom_ops import BY_VALUES, DRAWING
from autoddl.runtime.batches import LocalBatch
from autoddl.runtime.collectives.recorder import Recorder

__all__ = ["StepGraph", "check_graph"]


def check_graph(graph: Graph, device: torch.device, codecs: Iterable[str] = (), sparse: bool = False) -> None:
    """Raises InputError where the steps of a program cannot be one CUDA graph.

    `codecs` are those that messages are sent as; `sparse` says whether it has sparse sums.
    """
    if device.type != "cuda":
        raise InputError(f"the steps of a plan are one CUDA graph on a GPU only, and this rank runs on {device}: leave "
                         "out graph=True")
    if any(CODECS[name].lossless for name in codecs):
        raise InputError("lossless messages wait for how many exponents find no room, and a CUDA graph waits for "
                         "nothing: leave out graph=True, or plan without lossless")
    if sparse:
        raise InputError("sparse sums wait for how many values are large, and a CUDA graph waits for nothing: leave "
                         "out graph=True, or plan without sparse")
    drawing = next((op for op in graph.ops if op.target in DRAWING), None)
    if drawing is not None:
        raise InputError(f"{drawing.module or drawing.name} draws other numbers in every step, and a CUDA graph the "
                         "same in all: set dropout to 0 (or the module to eval), or leave out graph=True")
    waiting = next((op for op in graph.ops if op.target in BY_VALUES), None)
    if waiting is not None:
        what = "which keys its mask leaves" if waiting.target == FLEXIBLE else "how many tokens each expert has"
        raise InputError(f"{waiting.module or waiting.name} waits for {what}, and a CUDA graph waits for nothing: "
                         "leave out graph=True")


class StepGraph:
    """The steps of `train`, which computes the gradients of `parameters` of a batch and returns its loss."""

    def __init__(self, train: Callable[[LocalBatch], Tensor], parameters: Iterable[nn.Parameter], recorder: Recorder,
                 device: torch.device) -> None:
        self._train, self._parameters, self._recorder, self._device = train, tuple(parameters), recorder, device
        self._ran = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, batch: LocalBatch) -> Tensor:
        """Adds the gradients of `batch` to `.grad`; returns its loss."""
        if not self._ran:
            self._ran = True
            return self._apart(batch)
        if self._graph is None:
            self._capture(batch)
        assert self._graph is not None
        before = {p: self._kept(p) for p in self._parameters if p.grad is not None}
        for mine, given in zip(self._batch.parts, batch.parts, strict=True):
            for name, piece in mine.items():
                piece.copy_(given[name], non_blocking=True)
        self._graph.replay()
        for p, gradient in self._gradients.items():
            if p in before:
                gradient.add_(before[p])
            p.grad = gradient
        self._recorder.executed = list(self._executed)
        return self._loss.clone()

    def _kept(self, p: nn.Parameter) -> Tensor:
        """The gradient of `p`, where the replay does not write over it."""
        assert p.grad is not None
        return p.grad.clone() if p.grad is self._gradients.get(p) else p.grad

    def _apart(self, batch: LocalBatch) -> Tensor:
        """A step on a stream of its own."""
        here, apart = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        apart.wait_stream(here)
        with torch.cuda.stream(apart):
            loss = self._train(batch)
        here.wait_stream(apart)
        return loss

    def _capture(self, batch: LocalBatch) -> None:
        """Captures a step; raises MachineError where something in it waits for the GPU."""
        before = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._batch = LocalBatch(tuple({name: piece.clone() for name, piece in part.items()} for part in batch.parts))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._train(self._batch)
        except RuntimeError as error:
            raise MachineError(f"this step cannot be captured as a CUDA graph: {str(error).splitlines()[0]}; leave out "
                               "graph=True") from error
        self._gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        self._executed, self._graph = list(self._recorder.executed), graph
        for p, gradient in zip(self._parameters, before, strict=True):
            p.grad = gradient
