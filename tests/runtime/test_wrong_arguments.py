"""Arguments of the wrong kind or order, wrapped modules, batches that do not fit: one line with the way out."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from tiny import tiny
from torch import nn

import autoddl
from autoddl import checkpoint, recovery
from autoddl.core.errors import AutoDDLError, InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.runtime import parallel_model
from autoddl.runtime.batches import SeenBatches
from autoddl.runtime.parallel_model import ParallelModel

ALONE = """
name: alone
device: {name: cpu, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}
levels: [{name: machine, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""


@dataclass(frozen=True)
class Case:
    """A plan for one process, its model, an optimizer, and a folder."""

    plan: Plan
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    folder: Path

    @property
    def ids(self) -> torch.Tensor:
        return torch.zeros(8, 6, dtype=torch.int64)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    plan = autoddl.plan(tiny(1), parse_cluster(ALONE % 1, "test"), workers=1)
    model = autoddl.parallelize(tiny(1), plan)
    return Case(plan, model, torch.optim.AdamW(model.parameters()), tmp_path_factory.mktemp("wrong"))


UNTYPED: Any = autoddl
DATA = torch.utils.data.TensorDataset(torch.zeros(1))



def _optimizer_before(on: Any) -> object:
    module = tiny(1)
    optimizer = torch.optim.AdamW(module.parameters())
    return UNTYPED.parallelize(module, on.plan), optimizer


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a batch that is spread out": (
        lambda on: on.model.step(on.ids, on.ids),
        r"step takes one batch, and 2 arguments were given: write model\.step\(batch\) in place of model\.step\(\*"),
    "keywords of forward": (lambda on: on.model.step(ids=on.ids, labels=on.ids), "one batch, and 2 arguments were"),
    "no batch": (lambda on: on.model.step(), "step takes one batch, and 0 arguments were given"),
    "another length": (lambda on: on.model.step((on.ids[:, :5], on.ids[:, :5])),
                       r"ids is int64\[8, 5\].*int64\[8, 6\]: pad or cut dim 1 to the planned size on every rank"),
    "another dtype": (lambda on: on.model.step((on.ids.int(), on.ids)), r"int32.*cast it with \.to\(torch\.int64"),
    "another number of dims": (lambda on: on.model.step((on.ids[0], on.ids[0])), "give it with these dims"),
    "swapped parallelize": (
        lambda on: UNTYPED.parallelize(on.plan, tiny(1)),
        r"parallelize\(model, plan\): the model is a torch\.nn\.Module, not a Plan; give the arguments in this order"),
    "swapped plan": (
        lambda on: UNTYPED.plan("cluster.yaml", tiny(1)),
        r"plan\(model, cluster, sample\): the model is a torch\.nn\.Module, not a str 'cluster\.yaml'"),
    "a plan's file": (lambda on: UNTYPED.parallelize(tiny(1), "plan.json"),
                      r"the plan is a Plan, as autoddl\.plan or autoddl\.load_plan return it, not a str 'plan\.json'"),
    "a model for a cluster": (lambda on: UNTYPED.plan(tiny(1), tiny(1)),
                              "the cluster is the path of a cluster file, or a Cluster, not a Tiny"),
    "swapped resume": (
        lambda on: recovery.resume(on.model, on.optimizer, on.folder),
        r"recovery\.resume\(folder, model, optimizer\): the folder is a path, not a MeshModel; give the arguments in"),
    "swapped load": (
        lambda on: checkpoint.load(on.folder, on.model, on.optimizer),
        r"checkpoint\.load\(model, optimizer, folder\): the folder is a path, not an AdamW"),
    "swapped save": (lambda on: checkpoint.save(on.optimizer, on.model, on.folder),
                     r"checkpoint\.save\(.*\): the model is what autoddl\.parallelize returned, not an AdamW"),
    "a plain module saved": (lambda on: checkpoint.save(tiny(1), None, on.folder),
                             r"the model is what autoddl\.parallelize returned, not a Tiny"),
    "a scheduler for an optimizer": (
        lambda on: recovery.resume(on.folder, on.model, torch.optim.lr_scheduler.ConstantLR(
            on.optimizer)), r"the optimizer is a torch\.optim\.Optimizer, or None, not a ConstantLR"),
    "a loader without a state": (
        lambda on: recovery.resume(on.folder, on.model, on.optimizer, loader=torch.utils.data.DataLoader(DATA)),
        "loader is a DataLoader without state_dict and load_state_dict.*torchdata's StatefulDataLoader"),
    "a loader without a state, kept": (
        lambda on: recovery.Keeper(on.folder, every=1).after_step(on.model, on.optimizer, loader=[]),
        "loader is a list without state_dict"),
    "a swapped keeper": (lambda on: recovery.Keeper(10, on.folder),
                         r"Keeper\(folder, every, keep\): the folder is a path, not an int"),
    "DataParallel": (lambda on: UNTYPED.parallelize(nn.DataParallel(tiny(1)), on.plan),
                     "the model is wrapped in DataParallel, whose work a plan does itself: give the module inside"),
    "an optimizer made before": (
        _optimizer_before, r"an AdamW was made of the parameters of this model, and would train nothing: .*afterwards"),
    "parallel already": (lambda on: UNTYPED.parallelize(on.model, on.plan), "parallel already: give the plain module"),
    "an unknown option": (lambda on: UNTYPED.plan(tiny(1), parse_cluster(ALONE % 1, "test"), optimiser="sgd"),
                          "there is no option 'optimiser'; did you mean 'optimizer'"),
    "a number of stages": (lambda on: UNTYPED.plan(tiny(1), parse_cluster(ALONE % 1, "test"), stages=2),
                           r"stages is 2: give a tuple of what is asked for, like stages=\(2,\)"),
    "a text of pins": (lambda on: UNTYPED.plan(tiny(1), parse_cluster(ALONE % 1, "test"), pins="machine=tensor"),
                       "pins is 'machine=tensor': give a tuple"),
    "a loader's own batch": (lambda on: UNTYPED.RankLoader(on.model, DATA, batch_size=4),
                             "RankLoader has no option 'batch_size': batches are the plan's"),
    "a piece of a batch unpacked": (lambda on: tuple(on.model.local_batch((on.ids, on.ids))),
                                    r"a rank's piece of a batch, which model\.step and model\(\.\.\.\) take as it is"),
    "backward of a step": (lambda on: on.model.step((on.ids, on.ids)).backward(),
                           r"model\.step has run backward already.*leave \.backward\(\) out"),
    "backward of a scaled step": (lambda on: (on.model.step((on.ids, on.ids)) / 4).backward(),
                                  r"a loop that calls it itself takes autoddl\.planned_module\(model\)"),
    "backward of a call": (lambda on: on.model((on.ids, on.ids)).backward(), r"write model\.step\(batch\) in place of"),
    "a copy": (lambda on: copy.deepcopy(on.model), r"neither copied nor pickled.*copy its values, \{name: "),
    "a pickle": (lambda on: torch.save(on.model, on.folder / "m.pt"), r"or write them by autoddl\.checkpoint\.save"),
    "no state": (lambda on: on.model.load_state_dict(None), r"a dict of tensors by name, not None"),
    "a state in a state": (lambda on: on.model.load_state_dict({"model": on.model.state_dict()}),
                           r"the state of the model alone, state\['model'\]"),
    "a wrapper's state": (
        lambda on: on.model.load_state_dict({f"module.{k}": v for k, v in on.model.state_dict().items()}),
        r"lacks tokens\.weight and \d+ more and has module\.tokens\.weight and \d+ more; take 'module\.' off its"),
    "half of a state": (
        lambda on: on.model.load_state_dict(dict([*on.model.state_dict().items()][1:])),
        r"it lacks tokens\.weight; give one of this model, or strict=False"),
    "a larger state": (
        lambda on: on.model.load_state_dict(on.model.state_dict() | {"tokens.weight": torch.zeros(9, 9)}),
        r"tokens\.weight is \[9, 9\] in this state, and \[64, 16\] in the model"),
    "DataParallel planned": (lambda on: UNTYPED.plan(nn.DataParallel(tiny(1)), parse_cluster(ALONE % 1, "test"),
                                                     (on.ids, on.ids)), "wrapped in DataParallel")}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_argument_is_one_line_with_the_way_out(name: str, case: Case) -> None:
    mistake, pattern = MISTAKES[name]
    with pytest.raises(InputError, match=pattern) as caught:
        mistake(case)
    assert "\n" not in str(caught.value)


def errors_of_a_rank(path: str) -> list[str]:
    """What a rank is told that gives the module in torch's wrappers, and its own share of the batch."""
    rank, plan = torch.distributed.get_rank(), autoddl.load_plan(path)
    wrapped = nn.parallel.DistributedDataParallel(tiny(1))
    share = torch.full((8, 6), rank)
    parallel = autoddl.parallelize(tiny(1), plan)
    said = []
    for mistake in (lambda: autoddl.parallelize(wrapped, plan), lambda: parallel.step((share, share))):
        try:
            mistake()
        except AutoDDLError as error:
            said.append(str(error))
    whole = torch.zeros(8, 6, dtype=torch.int64)
    parallel.step((whole, whole))
    with pytest.raises(MismatchError) as other:
        parallel.step((share[:4], share[:4]))  # as many rows as a last batch may have
    return [*said, str(other.value)]


@pytest.mark.ranks
def test_ranks_that_give_wrapped_modules_or_shares_of_a_batch_are_told(tmp_path: Path) -> None:
    autoddl.plan(tiny(1), parse_cluster(ALONE % 2, "test"), workers=1).save(tmp_path / "plan.json")
    first, second = on_ranks(2, errors_of_a_rank, str(tmp_path / "plan.json"))
    assert first == second and len(first) == 3
    assert "the model is wrapped in DistributedDataParallel, whose work a plan does itself" in first[0]
    for said in first[1:]:
        assert "rank 1 has another batch than rank 0" in said and "give the global batch on every rank" in said


def test_the_loss_of_a_step_is_saved_as_a_tensor_and_adds_to_losses_that_have_gradients(case: Case) -> None:
    loss, own = case.model.step((case.ids, case.ids)), torch.ones((), requires_grad=True)
    assert f"{loss:.2f} {loss.mean():.2f} {copy.deepcopy(loss):.2f}" == " ".join([f"{loss.item():.2f}"] * 3)
    torch.save(loss, case.folder / "loss.pt")
    assert type(torch.load(case.folder / "loss.pt")) is torch.Tensor
    (loss + 3 * own).backward()
    assert own.grad == 3


def test_a_state_of_some_names_is_loaded_where_it_is_asked_for(case: Case) -> None:
    state = {"tokens.weight": torch.full((64, 16), 0.5), "other": torch.ones(1)}
    before = case.model.state_dict()["head.weight"].clone()
    case.model.load_state_dict(state, strict=False)
    after = case.model.state_dict()
    assert torch.equal(after["tokens.weight"], state["tokens.weight"]) and torch.equal(after["head.weight"], before)


def errors_of_drifting_ranks(folder: str, each: int) -> list[int]:
    """The steps at which a rank whose batches differ from the third on is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_model, "COMPARED", each)
        return steps_that_are_told(folder, each)


def steps_that_are_told(folder: str, each: int) -> list[int]:
    parallel = autoddl.parallelize(tiny(1), autoddl.load_plan(folder))
    for number in range(8):
        ids = torch.full((8, 6), parallel.groups.rank if number > 2 else 0)
        try:
            parallel.step((ids, ids))
        except MismatchError as error:
            assert f"has another batch since step {number - number % each - each} than rank 0" in str(error)
            return [number]
    return []


@pytest.mark.ranks
def test_batches_that_drift_apart_are_told_before_many_steps_are_done(tmp_path: Path) -> None:
    autoddl.plan(tiny(1), parse_cluster(ALONE % 2, "test"), workers=1).save(tmp_path / "plan.json")
    assert on_ranks(2, errors_of_drifting_ranks, str(tmp_path / "plan.json"), 4) == [[4], [4]]


@pytest.mark.parametrize("shape", [(), (3,), (5000, 1), (2, 9000), (70, 3, 70)])
def test_a_checksum_of_batches_changes_with_what_is_in_them(shape: tuple[int, ...]) -> None:
    def summed(*batches: torch.Tensor) -> str:
        seen = SeenBatches()
        for one in batches:
            seen.add((one,))
        return seen.text()

    zeros, ones = torch.zeros(shape), torch.ones(shape)
    different = [summed(zeros), summed(ones), summed(zeros, ones), summed(ones, zeros), summed(zeros[None])]
    assert len(set(different)) == len(different) and summed(zeros, ones) == summed(zeros.clone(), ones.clone())


def test_what_a_planned_model_has_not_is_said_without_a_name_of_ours(case: Case) -> None:
    with pytest.raises(AttributeError, match=r"^a model that parallelize returned has no 'head': the module's own is "
                                             r"model\.module\.head$"):
        getattr(case.model, "head")  # noqa: B009
    with pytest.raises(AttributeError, match=r"^a model that parallelize returned has no 'haed'$"):
        getattr(case.model, "haed")  # noqa: B009
    assert not hasattr(case.model, "config") and "MeshModel" not in repr(case.model)
