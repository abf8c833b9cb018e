"""Makes a model that trains from a module and a plan: the user's own module, whose step runs as the plan says.

    model = parallelize(module, plan)
    loss = model.step(batch)                  forward and backward; gradients are in .grad of model.parameters()
    loss = model(batch)                       forward alone, nothing dropped, no buffer updated

A batch is the global one, the same on every rank, or this rank's pieces of it, from `local_batch`. All ranks make the
same calls.

A plan of m microbatches runs them one after the other, each a contiguous m-th of the batch's rows:

    loss = mean of the m losses        gradient = sum of the m gradients / m

This equals one pass over the whole batch if the loss is a mean over the rows. A loss that sums over the rows comes out
m times too small. A mean over other counts (tokens that are not ignored) becomes a mean of means, as wherever gradients
are accumulated. Every microbatch updates the buffers (batch norm).
"""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import materialise
from autoddl.capture.sample import as_sample, from_spec, parted
from autoddl.capture.trace import check_held
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import VERSION, Plan
from autoddl.core.precision import Precision
from autoddl.runtime.batches import Batches, LocalBatch
from autoddl.runtime.lowering import LoweredProgram, communication_axes, lower_plan
from autoddl.runtime.optimizer_guard import guard_optimizers
from autoddl.runtime.parameter_store import Store
from autoddl.runtime.parameters import shard_parameters
from autoddl.runtime.process_groups import Groups
from autoddl.runtime.recompute import SavedTensors
from autoddl.runtime.redistribute import Recorder, run_moves, start_moves
from autoddl.runtime.world import check_agreement, device_of, join_processes
from autoddl.schedule.traffic import traffic

__all__ = ["LocalBatch", "ParallelModel", "parallelize"]

PART = 2**24
"""Elements of a tensor that are hashed, and so copied, at a time."""


def parallelize(model: nn.Module, plan: Plan, sample: object = None, *, device: torch.device | str | None = None,
                seed: int = 0, timeout: float = 600.0, captured: Captured | None = None) -> "ParallelModel":
    """The model that runs `model` as `plan` says, on this rank. Every rank calls it, with equal arguments.

        sample      a global batch, only needed where the sample of the plan does not fit the module
        device      by default that of the plan's backend (`device_of`)
        seed        seed of dropout, and of weights that are not there yet
        timeout     seconds that a collective may take
        captured    the model captured with one microbatch, so that it is not captured again

    Raises MismatchError where the plan does not fit the model, the ranks or this version, or ranks disagree. Raises
    InputError for a model that is parallel already, MachineError where processes cannot reach each other.
    """
    place, limit = device_of(plan.backend, device), timedelta(seconds=timeout)
    if plan.version != VERSION:
        raise MismatchError(f"the plan is of version {plan.version}, this AutoDDL runs version {VERSION}: plan again")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise InputError("the model's parameters are DTensors already; give parallelize the plain module")
    join_processes(plan.mesh, place, limit)
    if captured is None:
        captured = capture(model, from_spec(plan.sample, "meta") if sample is None
                           else parted(as_sample(sample), plan.microbatches), Precision.parse(plan.precision))
    _check_model(captured, plan)
    check_held(captured.graph, captured.constants)
    graph = add_hubs(captured.graph)
    check_agreement({"plan": (plan.fingerprint(), plan.source.get("cluster"), *traffic(plan, graph)), "seed": [seed]})
    materialise(model, seed)
    check_agreement({"value of the weights": map(_digest, model.parameters()),
                     "value of the buffers": map(_digest, model.buffers()),
                     "value of the constants": map(_digest, captured.constants.values())})
    groups = Groups(plan.mesh, communication_axes(plan, graph), limit, plan.source.get("cluster"))
    return ParallelModel(model, plan, captured, graph, groups, place, seed)


def _digest(value: Tensor) -> str:
    """A hash of the tensor's bytes: the same on every host, and another one if elements change or move."""
    found = hashlib.blake2b(digest_size=8)
    for part in value.detach().reshape(-1).split(PART):
        found.update(part.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _on(device: torch.device, module: nn.Module, graph: Graph) -> None:
    """Moves the buffers to the device, in the dtypes of the graph; one that several modules share stays shared."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    dtypes = {id(module.get_buffer(t.fqn)): getattr(torch, t.dtype) for t in graph.tensors if t.kind is Kind.BUFFER}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                new = buffer.to(device, dtypes.get(id(buffer), buffer.dtype))
                part._buffers[name] = moved.setdefault(id(buffer), (buffer, new))[1]


def _check_model(captured: Captured, plan: Plan) -> None:
    found, made = captured.graph.fingerprint(), plan.fingerprints.get("model")
    if found != made:
        raise MismatchError(f"the plan was made for another model than this one (graph {made}, not {found}): a plan "
                            "fits one architecture, size, dtype, mode (train or eval) and batch shape; plan again")


class ParallelModel:
    """One rank of a planned model, made by `parallelize`; `recorder` has the collectives of the last step."""

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, graph: Graph, groups: Groups,
                 device: torch.device, seed: int) -> None:
        self.module, self.plan, self.graph, self.groups, self.recorder = module, plan, graph, groups, Recorder()
        self.steps, self._device, self._captured, self._first = 0, device, captured, seed
        self._seed = torch.tensor(seed)
        _on(device, module, graph)
        inputs = tuple(t for t in graph.tensors if t.kind is Kind.INPUT)
        self._batches = Batches(module.forward, inputs, captured.spec, plan.inputs, groups, device,
                                plan.microbatches)
        self._stored = shard_parameters(module, captured.graph, plan, groups, device)
        guard_optimizers(self, module.parameters())
        self._store = Store(plan, graph, self._stored, groups, self.recorder)
        self._saved = SavedTensors(self._store.gathers, self.recorder)
        self._train = self._lower(self._saved)
        self._evaluate: LoweredProgram | None = None

    def _lower(self, saved: SavedTensors | None) -> LoweredProgram:
        return lower_plan(self._captured, self.graph, self.plan, self.groups, self._store.parameters, self.recorder,
                          self._device, self._seed, saved)

    def _arguments(self, lowered: LoweredProgram, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """The arguments of the program, in order: pieces of a microbatch, leaves, buffers, constants."""
        found = []
        for t in lowered.reads:
            tensor = self.graph.tensors[t]
            if tensor.kind is Kind.INPUT:
                found.append(pieces[tensor.fqn])
            elif tensor.kind is Kind.PARAMETER:
                found.append(self._stored[tensor.fqn].leaf)
            elif tensor.kind is Kind.BUFFER:
                found.append(self.module.get_buffer(tensor.fqn))
            else:
                found.append(self._captured.constants[t].to(self._device))
        return found

    def step(self, batch: object) -> Tensor:
        """Runs forward and backward of one batch; returns its loss on every rank, the mean over the microbatches.

        Gradients add up in .grad until they are zeroed.
        """
        parts = self._batches.local(batch).parts
        self._store.clear()
        self.recorder.clear()
        losses = [self._microbatch(part, pieces) for part, pieces in enumerate(parts)]
        self.steps += 1
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _microbatch(self, part: int, pieces: Mapping[str, Tensor]) -> Tensor:
        """Runs forward and backward of microbatch `part`; returns its loss."""
        parts = self.plan.microbatches
        last = part == parts - 1
        self._store.begin(last)
        self._saved.clear()
        self._seed.fill_(self._first + self.steps * parts + part)
        if part:
            self.recorder.direction = "forward"
        with self._saved.notes():
            results = self._train.program.forward(*self._arguments(self._train, pieces))
        ends = [start_moves(route.forward, x) for route, x in zip(self._train.ends, results, strict=True)]
        self.recorder.direction = "backward"
        results[0].backward(run_moves(self._train.ends[0].backward, torch.full_like(results[0], 1 / parts)))
        self._saved.clear()
        self._store.finish(last)
        loss, *buffers = (end() for end in ends)
        with torch.no_grad():
            new_values = [buffer.clone() for buffer in buffers]  # one may be what another buffer was
            for (old, _), new in zip(self.graph.updates, new_values, strict=True):
                self.module.get_buffer(self.graph.tensors[old].fqn).copy_(new)
            return loss.clone()  # it may lie where the losses of all elements were

    def __call__(self, batch: object) -> Tensor:
        """The loss of one batch, by the training program without dropout; gradients and buffers stay unchanged."""
        with torch.inference_mode(False), torch.no_grad():  # tensors of that mode cannot be sent from another thread
            return self._loss(batch)

    def _loss(self, batch: object) -> Tensor:
        if self._evaluate is None:
            self._evaluate = self._lower(None)
        parts, losses = self._batches.local(batch).parts, list[Tensor]()
        self._store.clear()
        self.recorder.clear()
        for part, pieces in enumerate(parts):
            self._store.begin(part == len(parts) - 1)
            loss, *_ = self._evaluate.program.forward(*self._arguments(self._evaluate, pieces))
            losses.append(run_moves(self._evaluate.ends[0].forward, loss))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def local_batch(self, batch: object) -> LocalBatch:
        """This rank's pieces of a global batch: for loaders that keep only these."""
        return self._batches.local(batch)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the module, DTensors if any is stored in pieces."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the module by name."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by name, sharded ones as DTensors."""
        return get_model_state_dict(self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of this plan, or whole tensors, the same on every rank."""
        whole = not any(isinstance(value, DTensor) for value in state.values())
        set_model_state_dict(self.module, dict(state), options=StateDictOptions(full_state_dict=whole))
