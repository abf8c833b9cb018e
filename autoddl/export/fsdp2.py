"""Writes a Python program that trains under `fully_shard` and `parallelize_module` of torch, and runs with torchrun.

    zero-3                 reshard_after_forward=True
    zero-2                 reshard_after_forward=False, and weights stay between microbatches
    zero-1                 that, and gradients are reduced for the last microbatch alone
    data                   the outer axis of the mesh of fully_shard, of which each rank has everything
    zero-2 zero-3          reshard_after_forward=N: weights stay among N ranks between forward and backward
    tensor                 ColwiseParallel and RowwiseParallel, module by module, as the nearest plan splits parameters
    recomputation          torch.utils.checkpoint, block by block

Beside `tensor`, all tensors are DTensors, and torch decides in which layouts other ops run. The program has the model
from the factory that the plan names.
"""

from collections.abc import Sequence

from autoddl.core.errors import InputError
from autoddl.core.precision import Precision
from autoddl.core.recompute import FULL, NO_RECOMPUTE, SELECTIVE
from autoddl.export.configuration import Configuration
from autoddl.export.target import Model, Target, TargetLimits, TensorPiece

__all__ = ["FSDP2"]

LIMITS = TargetLimits(
    data=frozenset({(), ("data",), ("zero-2", "zero-3"), *(
        roles for zero in ("zero-1", "zero-2", "zero-3") for roles in ((zero,), ("data", zero)))}),
    stages=False, precisions=("float32", "bf16-mixed", "bf16-mixed,reduce=bfloat16"),
    recompute=("none", "full", "selective", "first", "every", "first:selective", "every:selective", "names"))

HEAD = '''"""Trains {model} on {ranks} ranks: {configuration}.

    torchrun --nproc-per-node {ranks} THIS_FILE [steps]
"""

import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FACTORY = {factory!r}
ARGUMENTS = {arguments!r}
DEGREES = {degrees!r}          # of the mesh: replicate, shard, tensor
MICROBATCHES = {microbatches}
RESHARD_AFTER_FORWARD = {reshard!r}
KEEP_WEIGHTS = {keep_weights!r}         # between microbatches
KEEP_GRADIENTS = {keep_gradients!r}       # whole, until the last microbatch
PRECISION = MixedPrecisionPolicy({policy})
UNITS = {units!r}
RECOMPUTED = {recomputed!r}
SELECTIVE = {selective!r}
TIES = {ties!r}
'''

BODY = '''

def build():
    """The module, and the batch of all ranks as positional arguments and keywords."""
    file, name = FACTORY.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location("model_file", file)
    found = importlib.util.module_from_spec(spec)
    sys.path.append(os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(found)
    made = getattr(found, name)(**ARGUMENTS)
    model, batch = made if isinstance(made, tuple) else (made, made.example_inputs())
    if isinstance(batch, dict):
        return model, (), batch
    return model, batch if isinstance(batch, tuple) else (batch,), {}


def tensor_plan():
    """The style of every module that tensor parallelism splits."""
    return {styles}


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the parameters over the ranks of `mesh`; what is not split is whole on each."""
    for fqn, dim in {others!r}.items():
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        pieces = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
        module.register_parameter(name, nn.Parameter(pieces))
    parallelize_module(model, mesh, tensor_plan())
    distribute_module(model, mesh)
    tie(model)


def tie(model: nn.Module) -> None:
    """Makes one parameter again of those that had several names."""
    for fqn, alias in TIES:
        owner, _, name = alias.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(fqn))


def recompute(model: nn.Module) -> None:
    """Lets backward run the forward of some blocks again."""
    products = [getattr(torch.ops.aten, name).default for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu")]
    kept = partial(create_selective_checkpoint_contexts, products)
    for name in (*RECOMPUTED, *SELECTIVE):
        block = model.get_submodule(name)
        options = {"context_fn": kept} if name in SELECTIVE else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits parameters, gradients and the optimizer's state over the ranks that split the batch."""
    options = {"mesh": mesh["replicate", "shard"], "mp_policy": PRECISION}
    for name in UNITS:
        fully_shard(model.get_submodule(name), reshard_after_forward=RESHARD_AFTER_FORWARD, **options)
    fully_shard(model, reshard_after_forward=RESHARD_AFTER_FORWARD, **options)


def attention(device: torch.device):
    """The attention of DTensors: on the CPU torch has a rule for its products alone."""
    return sdpa_kernel(SDPBackend.MATH) if DEGREES[2] > 1 and device.type == "cpu" else nullcontext()


def own_rows(value, part: int, rank: int, ranks: int):
    """The rows of microbatch `part` that a rank has, of a tensor of all rows."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return value.chunk(MICROBATCHES)[part].chunk(ranks)[rank]


def train(steps: int, lr: float = 1e-3) -> list:
    """The loss of every step."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() \\
        else torch.device("cpu")
    mesh = init_device_mesh(device.type, DEGREES, mesh_dim_names=("replicate", "shard", "tensor"))
    torch.manual_seed(0)
    model, args, kwargs = build()
    if any(p.is_meta for p in model.parameters()):
        raise SystemExit(f"{FACTORY} makes weights on the meta device: let it make real ones, or load them here")
    model.to(device)
    ranks = DEGREES[0] * DEGREES[1]
    rank = mesh["replicate"].get_local_rank() * DEGREES[1] + mesh["shard"].get_local_rank()
    recompute(model)
    if DEGREES[2] > 1:
        split_tensors(model, mesh["tensor"])
    if ranks > 1:
        shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def own(value, part: int):
        value = own_rows(value, part, rank, ranks)
        if not isinstance(value, torch.Tensor):
            return value
        value = value.to(device)
        return DTensor.from_local(value, mesh["tensor"], [Replicate()]) if DEGREES[2] > 1 else value

    losses = []
    for _ in range(steps):
        whole = torch.zeros((), device=device)
        for part in range(MICROBATCHES):
            last = part == MICROBATCHES - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last or not KEEP_GRADIENTS)
                model.set_reshard_after_backward(last or not KEEP_WEIGHTS)
            with implicit_replication(), attention(device):
                loss = model(*(own(value, part) for value in args),
                             **{name: own(value, part) for name, value in kwargs.items()}) / MICROBATCHES
                loss.backward()
            loss = loss.detach()
            whole += loss.full_tensor() if isinstance(loss, DTensor) else loss
        optimizer.step()
        optimizer.zero_grad()
        for name in ("replicate", "shard"):
            dist.all_reduce(whole, group=mesh[name].get_group())
        losses.append(whole.item() / ranks)
    return losses


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    found = train(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": found}))
    dist.destroy_process_group()
'''


def _reshard(given: Configuration) -> bool | int:
    """The value of reshard_after_forward."""
    if given.degree("zero-3") == 1:
        return False
    return given.degree("zero-3") if given.degree("zero-2") > 1 else True


def _recomputed(policy: str, blocks: Sequence[str]) -> tuple[list[str], list[str]]:
    """The blocks that are recomputed at the levels full and selective."""
    if policy == NO_RECOMPUTE:
        return [], []
    word, _, level = policy.partition(":")
    kind, _, number = word.partition("-")
    counts = {"full": 1, "selective": 1}.get(word)
    if counts or (kind in ("first", "every") and number.isdigit()):
        names = list(blocks) if counts else list(blocks[:int(number)] if kind == "first" else blocks[::int(number)])
        deep = level != SELECTIVE and word != SELECTIVE
        return (names, []) if deep else ([], names)
    pairs = [entry.partition(":")[::2] for entry in policy.split("+")]
    return ([name for name, level in pairs if level in ("", FULL)],
            [name for name, level in pairs if level == SELECTIVE])


def _styles(given: Configuration, model: Model) -> tuple[str, dict[str, int]]:
    """The text of the styles of modules, and the parameters that no style of torch splits, with their dims."""
    rows, others = list[str](), dict[str, int]()
    kept = "Shard(1)" if given.sequence else "Replicate()"
    names = {alias: fqn for fqn, alias in model.ties}
    every = {*(piece.fqn for piece in model.pieces)}
    for piece in [*model.pieces, *(TensorPiece(alias, one.dim, one.kind) for alias, fqn in names.items()
                                   for one in model.pieces if one.fqn == fqn)]:
        owner, _, name = piece.fqn.rpartition(".")
        style = _style(piece, piece.fqn in names, kept)
        if name == "weight" and style:
            rows.append(f"        {owner!r}: {style},")
        elif not (name == "bias" and f"{owner}.weight" in every):
            others[piece.fqn] = piece.dim
    if given.sequence:
        rows += [f"        {name!r}: SequenceParallel(use_local_output=False)," for name in model.norms]
    return "{\n" + "\n".join(rows) + "\n    }" if rows else "{}", others


def _style(piece: TensorPiece, tied: bool, kept: str) -> str:
    """The style of the module of a weight, "" where torch has none; what ties gives a weight is read by a product."""
    if piece.kind == "embedding" and not tied:
        return "ColwiseParallel(use_local_output=False)" if piece.dim == 1 else (
            f"RowwiseParallel(input_layouts=Replicate(), output_layouts={kept}, use_local_output=False)")
    if piece.kind not in ("linear", "embedding"):
        return ""
    return "ColwiseParallel(use_local_output=False)" if piece.dim == 0 else (
        f"RowwiseParallel(output_layouts={kept}, use_local_output=False)")


def _write(given: Configuration, model: Model) -> str:
    """The program. Raises InputError for a plan that does not say what makes its model."""
    factory = model.factory
    if not factory.get("file"):
        raise InputError("a program needs to know what makes the model, and this plan was made without a factory: plan "
                         "from the shell, like `autoddl plan FILE.py:NAME`")
    recipe = Precision.parse(given.precision)
    policy = f"param_dtype=torch.bfloat16, reduce_dtype=torch.{recipe.reduce}" if recipe.is_mixed else ""
    full, selective = _recomputed(given.recompute, [unit for unit in model.units if unit.rpartition(".")[2].isdigit()])
    styles, others = _styles(given, model) if given.degree("tensor") > 1 else ("{}", {})
    outer = given.degree("data") if given.degree("zero-1", "zero-2", "zero-3") > 1 or given.data == 1 else given.data
    blocks = tuple(unit for unit in model.units if unit.rpartition(".")[2].isdigit())
    head = HEAD.format(
        model=model.model, ranks=given.ranks, configuration=given, factory=f"{factory['file']}:{factory['name']}",
        arguments=dict(factory.get("arguments", {})), degrees=(outer, given.data // outer, given.degree("tensor")),
        microbatches=given.microbatches, reshard=_reshard(given),
        keep_weights=given.degree("zero-3") == 1, keep_gradients=given.degree("zero-2", "zero-3") == 1,
        policy=policy, units=blocks, recomputed=tuple(full), selective=tuple(selective), ties=tuple(model.ties))
    return head + BODY.replace("{styles}", styles).replace("{others!r}", repr(others))


def _notes(given: Configuration) -> list[str]:
    """Names what is different there though it has the same name."""
    found = []
    if given.degree("tensor") > 1:
        found.append("tensor parallelism: torch decides the layouts of ops between products, and gathers where it has "
                     "no rule")
    if given.precision != "float32":
        found.append("precision bf16-mixed: fully_shard computes everything in bfloat16, norms and losses too")
    return found


FSDP2 = Target("fsdp2", "FSDP2", LIMITS, _write, None, _notes)
