"""A model that trains as a plan says, on one rank: step, evaluation, parameters, state, norm of the gradients.

`mesh_model` is that of a plan without stages, `pipeline_model` that of one with stages.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured
from autoddl.capture.returned import LOSS, Returned
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import Graph, Kind
from autoddl.core.layout import Extent, Layout, extents
from autoddl.core.plan import Plan
from autoddl.runtime.batches import Batches, LocalBatch, SeenBatches, check_one_batch, digests
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.collectives.redistribute import Move
from autoddl.runtime.collectives.told_values import gather_values
from autoddl.runtime.gradients_together import clip_gradients
from autoddl.runtime.guards import CallLoss, StepLoss, check_state_dict, guard_optimizers, guard_placement
from autoddl.runtime.outputs import Asking, asked_outputs
from autoddl.runtime.program_runner import Asked, ProgramRunner
from autoddl.runtime.world import announce, check_agreement
from autoddl.schedule.traffic import PlannedCollective

__all__ = ["ParallelModel", "Planner", "Residual", "batches_of", "mean"]

COMPARED = 100
"""Steps after which ranks compare the batches that they were given since they last did."""
WAY_OUT = ("give the global batch on every rank, not a share of it (without DistributedSampler, and from one seed), or "
           "this rank's pieces as a LocalBatch")


class Residual(NamedTuple):
    """This rank's part of what a sparse sum has not sent: views of it, the step, and the groups that it is over.

    `velocity` is empty where the sum has no momentum.
    """

    values: Tensor
    velocity: Tensor
    move: Move
    groups: Groups

    def summed(self) -> Tensor:
        """The sum of the residuals of all ranks of the step; they all call it."""
        return self._over_ranks(self.values)

    def due(self) -> Tensor:
        """Returns what the next sum and its residuals have besides a gradient: residuals, and part of velocities."""
        assert self.move.sparse is not None
        momentum = self.move.sparse.rule.momentum
        return self._over_ranks(self.values + momentum * self.velocity if momentum else self.values)

    def _over_ranks(self, values: Tensor) -> Tensor:
        total, axes = values.clone(memory_format=torch.contiguous_format), self.move.axes
        self.groups.start("all-reduce", axes, total, total, asynchronous=False)
        return total


Planner = Callable[[Sample, bool], tuple[Captured, Plan]]
"""(a global batch, whether to train on it) -> the module captured for it, and a plan that stores the same pieces."""


class ParallelModel:
    """One rank of a planned model, made by `parallelize`; `recorder` has the collectives of the last step.

        module    the user's module, whose parameters are the pieces of this rank
        plan      the plan
        graph     the planned graph, of one microbatch; the captured one, without hubs, where the plan has stages
        groups    the groups of this rank's mesh, that of its stage where the plan has stages
        device    where this rank computes
        returned  what forward returns
        training  whether a call runs the training program (without dropout), or that of evaluation (after `eval`)
        steps     number of steps so far
        copies    names of parameters that an earlier stage has too: it saves them, and they count there

    Its plan's program trains, on batches of the planned shapes. Other programs are planned by `planner` when they are
    first needed, and kept. There is one for every other number of rows, for the shapes of samples, and for evaluation.
    They read the same stored pieces and add to the same gradients, so that nothing is copied from one to the other.
    Their sums of gradients are whole ones: the residuals of sparse sums are those of the plan's own program. Where
    these have momentum, there is no other program of training.
    """

    def __init__(self, module: nn.Module, plan: Plan, graph: Graph, groups: Groups, recorder: Recorder,
                 device: torch.device, returned: Returned, planner: Planner | None = None) -> None:
        self.module, self.plan, self.graph, self.groups, self.recorder = module, plan, graph, groups, recorder
        self.device, self.returned, self.training = device, returned, True
        self._planner, self._sampled, self._others = planner, set[str](), dict[str, ParallelModel]()
        self._reading = dict[ParallelModel, bool]()
        self.steps, self.copies = 0, frozenset[str]()
        self._compared: int | None = None
        self._seen = SeenBatches()
        guard_optimizers(self, module.parameters(), max((one.momentum for one in plan.sparse_sums.values()), default=0))
        guard_placement(module, device)

    def __repr__(self) -> str:
        return f"{self.module!r}\nas planned by AutoDDL, one of {self.plan.mesh.size} ranks of mesh {self.plan.mesh}"

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError for what a planned model has not, and says where the module's own is."""
            own = f": the module's own is model.module.{name}" if hasattr(self.__dict__.get("module"), name) else ""
            raise AttributeError(f"a model that parallelize returned has no {name!r}{own}", name=name, obj=self)

    def step(self, batch: object = None, *more: object, **named: object) -> Tensor:
        """Runs forward and backward of one batch; returns its loss on every rank, the mean over the microbatches.

        Gradients add up in .grad until they are zeroed. A batch of fewer rows, like the last of an epoch, is planned
        when it first comes. So is one of the shapes of a sample. The first batch of each is compared among the ranks,
        and a checksum every 100 steps. Raises InputError for arguments that are not one batch, MismatchError for one
        that does not fit, or that other ranks have otherwise.
        """
        check_one_batch(batch, more, named)
        self._compare(batch)
        one = self._program(batch, True)
        pieces = one._cut(batch)
        self.recorder.clear()
        one.steps = self.steps
        loss = one._train(pieces)
        self.steps += 1
        return loss.as_subclass(StepLoss)

    def __call__(self, batch: object, outputs: Asking = None, whole: bool = True) -> Any:
        """The loss of one batch, without dropout; gradients and buffers stay unchanged.

        After `eval()` it is that of a program of evaluation, which is planned at the first call, as modules in that
        mode compute it. With `outputs`, like `("loss", "logits")` or `"all"`, it is a dict of these. A part of a tuple
        is asked for by its place, as `(0, 1)`. Outputs are `whole` on every rank, or else DTensors, split as the
        program makes them. Raises InputError for an unknown output.
        """
        with torch.inference_mode(False), torch.no_grad():  # tensors of that mode cannot be sent from another thread
            one = self._program(batch, self.training)
            asked = asked_outputs(outputs, one.computed(), one.returned)
            if not whole and one.plan.microbatches > 1:
                raise InputError(f"outputs of {one.plan.microbatches} microbatches are not one tensor that is split: "
                                 "ask for them whole, or plan with one microbatch")
            pieces = one._cut(batch)
            self.recorder.clear()
            others = dict.fromkeys(name for name in asked.values() if name != LOSS)
            found = one._evaluate(pieces, Asked(tuple(others), whole))
            return found[LOSS].as_subclass(CallLoss) if outputs is None else {k: found[n] for k, n in asked.items()}

    def expect(self, batch: object) -> None:
        """From now on, batches of the shapes of this one are planned when they first come; nothing is planned now."""
        self._sampled.update({self.batches()[0].shapes(batch)} - {""})

    def prepare(self, batch: object) -> "ParallelModel":
        """Plans the program that trains on batches of the shapes of this one; every rank calls it.

        Raises MismatchError for a batch of other inputs than the plan's, InputError where there is no such plan.
        """
        own = self.batches()[0]
        shapes = own.shapes(batch)
        if not shapes or self._planner is None:
            own.local(batch)  # raises unless it is of the planned shapes
            return self
        self._sampled.add(shapes)
        return self._program(batch, True, prepared=True)

    def programs(self) -> dict[str, Plan]:
        """The plans of all programs so far by what they are for, with the seconds and bytes that are foreseen."""
        own = f"training of {self.batches()[0].planned()}"
        return {own: self.plan, **{name: one.plan for name, one in self._others.items()}}

    def _program(self, batch: object, training: bool, prepared: bool = False) -> "ParallelModel":
        """The model whose program runs this batch: this one, or one for other shapes or for evaluation.

        The first batch of a program is compared among the ranks, unless it is `prepared` for others.
        """
        if isinstance(batch, LocalBatch):
            return self._of_pieces(batch, training)
        own = self.batches()[0]
        shapes = own.shapes(batch)
        if self._planner is None or (training and shapes == own.planned()):
            return self
        name = f"{'training' if training else 'evaluation'} of {shapes}"
        if name not in self._others:
            if shapes == own.planned() or not self._is_known(batch, shapes):
                own.local(batch)  # raises where it does not fit
            if not prepared:
                check_agreement({"batch": digests(batch)}, WAY_OUT)
            announce(f"planning a program for {name}, once: this takes seconds")
            self._add(name, own.sample(batch), training)
        return self._others[name]

    def _add(self, name: str, batch: Sample, training: bool) -> None:
        """Plans another program."""
        assert self._planner is not None
        with torch.enable_grad():
            self._others[name] = self._other(self._planner, batch, training, name)

    def _of_pieces(self, batch: LocalBatch, training: bool) -> "ParallelModel":
        """The model whose program runs these pieces of a batch. Raises MismatchError where there is none."""
        one, evaluates = self._others.get(batch.program) if batch.program else self, batch.program.startswith("eval")
        if one is None or (training and evaluates):
            raise MismatchError(f"these pieces of a batch are for {batch.program}, which "
                                f"{'is no training' if one else 'this model has not run'}: give the global batch, "
                                "or make them by local_batch of this model, in the mode in which they are used")
        return one if training or evaluates else self._evaluates(one)

    def _evaluates(self, one: "ParallelModel") -> "ParallelModel":
        """The model that evaluates what `one` trains on. Raises MismatchError where any rank reads other pieces."""
        own = one.batches()[0]
        name = f"evaluation of {own.planned()}"
        if name not in self._others:
            self._add(name, own.whole(), False)
        found = self._others[name]
        if found not in self._reading:
            mine, theirs = found.batches(), one.batches()
            fits = len(mine) == len(theirs) and all(map(Batches.reads_pieces_of, mine, theirs))
            self._reading[found] = all(gather_values(fits)) if dist.is_initialized() else fits
        if not self._reading[found]:
            raise MismatchError(f"these pieces of a batch were cut for training, and {name} reads other pieces: give "
                                "the global batch, or make them by local_batch of this model after eval()")
        return found

    def _is_known(self, batch: object, shapes: str) -> bool:
        """Whether these are planned shapes, or those of a sample, but for the number of rows."""
        return shapes in {self.batches()[0].planned(), *self._sampled} or any(
            one.batches()[0].other_rows(batch) for one in (self, *self._others.values()))

    def _other(self, planner: Planner, batch: Sample, training: bool, name: str) -> "ParallelModel":
        """A model of the same pieces, for such batches. Raises MismatchError where the ranks' plans differ."""
        raise NotImplementedError

    def _compare(self, batch: object) -> None:
        """Compares batches among the ranks: the first one whole, and after every `COMPARED` steps what came since.

        Pieces of a batch differ by rank, and are not compared.
        """
        if isinstance(batch, LocalBatch):
            return
        self._seen.add(batch)
        first = self._compared is None
        if first or self.steps - (self._compared or 0) >= COMPARED:
            name = "batch" if first else f"batch since step {self._compared}"
            check_agreement({name: digests(batch) if first else [self._seen.text()]}, WAY_OUT)
            self._compared, self._seen = self.steps, SeenBatches()

    def train(self, mode: bool = True) -> Self:
        """Sets whether calls run the training program. `step` always trains, by the program of the plan.

        Raises InputError for a model of `autoddl.runtime`, which has no other program.
        """
        if not mode and self._planner is None:
            raise InputError("this model has no program of evaluation: autoddl.parallelize returns one that plans it")
        self.training = mode
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Lets calls run a program of evaluation: dropout is off, norms read their running statistics."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the model, if it is on that device and of that dtype already. Raises InputError otherwise."""
        self.module.to(*args, **kwargs)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    def _train(self, batch: LocalBatch) -> Tensor:
        raise NotImplementedError

    def _evaluate(self, batch: LocalBatch, asked: Asked) -> dict[str, Tensor]:
        raise NotImplementedError

    def computed(self) -> Collection[str]:
        """The names of the outputs, besides the loss, that calls can return now."""
        raise NotImplementedError

    def local_batch(self, batch: object) -> LocalBatch:
        """This rank's pieces of a global batch, for loaders that keep only these: of a step, after `eval` of a call."""
        return self._program(batch, self.training)._cut(batch)

    def _cut(self, batch: object) -> LocalBatch:
        """This rank's pieces of a global batch that the program of this model runs."""
        raise NotImplementedError

    def rows(self) -> tuple[int, ...]:
        """Positions in a planned global batch of the rows that this rank reads: all, some, or none on some stages."""
        spans = [one.rows_read() for one in self.batches() if one.rows_read()[1]]
        first, end = min((a for a, _ in spans), default=0), max((a + n for a, n in spans), default=0)
        parts = self.plan.microbatches
        each = next(one.rows() for one in self.batches()) // parts
        return tuple(part * each + row for part in range(parts) for row in range(first, end))

    def batch_of_rows(self, batch: object) -> LocalBatch:
        """This rank's pieces of a global batch of which `batch` has the rows of `rows()` alone, in that order.

        Raises MismatchError where it has another number of rows.
        """
        here = self.rows()
        first, number = (here[0], len(here) // self.plan.microbatches) if here else (0, 0)
        return LocalBatch(tuple(part for one in self.batches() for part in one.local_of_rows(batch, first, number)))

    def batches(self) -> Sequence[Batches]:
        """Returns what cuts the batches of the plan, for each program that this rank runs."""
        raise NotImplementedError

    def runners(self) -> Sequence[ProgramRunner]:
        """The programs that this rank runs."""
        raise NotImplementedError

    def planned(self) -> tuple[PlannedCollective, ...]:
        """The collectives and messages of a step on this rank, as planned."""
        raise NotImplementedError

    def like(self, module: nn.Module, captured: Captured) -> "ParallelModel":
        """A model by the same plan on the same groups, of another module, captured; nothing is sent coded."""
        raise NotImplementedError

    def piece(self, name: str) -> tuple[Extent, ...]:
        """(offset, size) along every dim of this rank's piece of a parameter."""
        runner = next(one for one in self.runners() if name in one.stored)
        found = runner.stored[name]
        return extents(found.tensor.shape, found.layout, runner.groups.mesh, runner.groups.coordinate)

    def residuals(self) -> dict[str, list[Residual]]:
        """By parameter, what sparse sums of its gradients have not sent yet (`core.sparse`).

        There is one for each sparse sum: those of a parameter that several stages of this rank have are several.
        """
        found: dict[str, list[Residual]] = {}
        for runner in self.runners():
            for members, move in runner.store.reducer.sparse_sums():
                assert move.sparse is not None
                for member, parts in zip(members, move.sparse.parts([one.leaf.shape for one in members]), strict=True):
                    found.setdefault(member.tensor.fqn, []).append(Residual(*parts, move, runner.groups))
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over parameters of the module that this rank has a part of, DTensors if any is stored in pieces."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """These parameters by name."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this rank by name, sharded ones as DTensors."""
        return get_model_state_dict(self.module)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a `state_dict` of this plan, or whole tensors, the same on every rank.

        Raises InputError for what is no state, MismatchError where a shape is another, or names are. Unless `strict`,
        the names that both have are loaded.
        """
        ties: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        own = self.state_dict()
        check_state_dict(state, own, ties.values(), strict)
        whole = not any(isinstance(value, DTensor) for value in state.values())
        set_model_state_dict(self.module, {name: state[name] for name in own if name in state},
                             options=StateDictOptions(full_state_dict=whole, strict=False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises InputError: copies and pickles of a model that is connected to other ranks are none."""
        raise InputError("a parallel model is neither copied nor pickled: it is connected to the other ranks; copy its "
                         "values, {name: p.detach().clone() for name, p in model.named_parameters()}, as \"Averaged "
                         "weights\" in docs/training.md does, or write them by autoddl.checkpoint.save")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`; returns the norm before, on every rank.

        It is that of the whole model: every element counts once, whatever is split, copied or on another stage.
        """
        counted = {fqn: (one, runner.groups) for runner in self.runners() for fqn, one in runner.stored.items()
                   if fqn not in self.copies}
        norm = clip_gradients(counted.values(), list(self.parameters()), max_norm)
        self.gradients_are_done()
        return norm

    def gradients_are_done(self) -> None:
        """Tells that the gradients are those of the model now: changes from here on are of others."""


def batches_of(module: nn.Module, captured: Captured, runner: ProgramRunner, device: torch.device, program: str = ""
               ) -> Batches:
    """The batches of a runner: inputs of the whole program are checked, those that its graph reads are cut."""
    inputs = tuple(t for t in captured.graph.tensors if t.kind is Kind.INPUT)
    whole = Layout.broadcast(runner.plan.mesh)
    layouts = {t.fqn: runner.plan.inputs.get(t.fqn, whole) for t in runner.graph.tensors if t.kind is Kind.INPUT}
    return Batches(module.forward, inputs, captured.spec, layouts, runner.groups, device, runner.parts,
                   program)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """The mean of the losses of the microbatches."""
    return torch.stack(list(losses)).mean() if len(losses) > 1 else losses[0]
