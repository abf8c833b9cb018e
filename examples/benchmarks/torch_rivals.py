"""torch's own ways to train `small_models` on several ranks, each with the settings that are worth trying.

    ddp    DistributedDataParallel                       bucket sizes
    fsdp   fully_shard of blocks and of the rest         weights kept or dropped after forward; prefetched
    hsdp   fully_shard inside, replicas outside          inner sizes
    tp     parallelize_module as Megatron cuts: column, row, vocabulary-parallel head and loss
    grid   tp inside, fully_shard or replicate outside   inner sizes                    with sequence parallel or not
    pipe   torch.distributed.pipelining, of a GPT: as many blocks in every stage        schedules and microbatches
           with `inner`, a stage has so many ranks, which train it by one of the ways above: ddp, fsdp or tp
    ep     transformers' own expert parallel, of a mixture, in FSDP2                    ranks of experts and of tp;
           tokens sent by all-to-all, or all tokens on all ranks of its tp and results summed

`staged_rivals(name, ranks)` lists those of a GPT that is worth stages: few of each that has none, many that have.
`expert_rivals(name, ranks)` lists those of a mixture.

`rivals(name, ranks)` lists them, `stepper(rival)` builds one: a function that trains a step on this rank's part
of the batch and returns the loss of that part. The mean of these over all ranks is the loss of the batch.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from megatron import megatron, parts, whole_head
from small_models import GPT, Loss, made
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

__all__ = ["RATE", "Rival", "expert_rivals", "rivals", "staged_rivals", "stepper"]

RATE = 0.01
"""Of plain gradient descent, which all contestants train with."""


@dataclass(frozen=True, slots=True)
class Rival:
    """`inner` ranks side by side share a piece of work or of the weights; `settings` as the family has them."""

    family: str
    model: str
    inner: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return " ".join(filter(None, (self.family, f"inner={self.inner}" if self.inner > 1 else "", words)))


def rivals(model: str, ranks: int) -> Iterator[Rival]:
    """All that are tried on `ranks` ranks."""
    inner = [n for n in (2, 4) if n < ranks]
    longs = (False,) if model in ("vgg", "vit") else (False, True)
    yield from (Rival("ddp", model, 1, {"MB": mb}) for mb in (0.25, 1, 4, 25))
    yield from (Rival("fsdp", model, 1, {"drop": drop, "ahead": ahead})
                for drop, ahead in ((False, 0), (False, 2), (True, 0)))
    yield from (Rival("hsdp", model, n, {"drop": False, "ahead": 0}) for n in inner)
    yield from (Rival("tp", model, ranks, {"sequence": long}) for long in longs)
    yield from (Rival("grid", model, n, {"outside": outside, "sequence": long})
                for n in inner for outside in ("replicate", "shard") for long in longs)
    if model.startswith("gpt"):
        yield from (Rival("pipe", model, 1, {"schedule": schedule, "parts": m})
                    for schedule, m in (("GPipe", 4), ("1F1B", 4), ("1F1B", 8), ("1F1B", 16)))
    if model == "gpt-deep":
        yield from (Rival("pipe", model, 1, {"schedule": schedule, "parts": m})
                    for schedule in ("Interleaved1F1B", "ZBVZeroBubble") for m in (4, 8))


def staged_rivals(model: str, ranks: int) -> Iterator[Rival]:
    """Those that are tried on `ranks` ranks beside a plan with stages."""
    module, batch = made(model)
    assert isinstance(module, GPT)
    rows, blocks = len(batch.args[0]), len(module.blocks)
    for inner in (n for n in (1, 2, 4) if n < ranks):
        fitting = [name for name in (*SINGLE, *DOUBLE) if blocks % (ranks // inner * (1 + (name in DOUBLE))) == 0]
        for way, name in product(("ddp", "fsdp", "tp") if inner > 1 else ("",), fitting):
            most = rows // inner if way in ("ddp", "fsdp") else rows
            if not (way == "ddp" and name in SPLIT):
                yield from (Rival("pipe", model, inner, {"way": way, "schedule": name, "parts": m})
                            for m in (most, most // 2)[:1 + (inner == 1 and name != "DualPipeV")])
    yield from _without_stages(model, ranks)


def expert_rivals(model: str, ranks: int) -> Iterator[Rival]:
    """Those of a mixture that are tried on `ranks` ranks."""
    for tensor in (n for n in (1, 2, 4, 8) if n <= ranks):
        if tensor < ranks:
            yield from (Rival("ep", model, tensor, {"experts": n, "by": "all_to_all"})
                        for n in (2, 4, 8) if max(2, tensor) <= n <= ranks)
        if tensor > 1:
            yield Rival("ep", model, tensor, {"experts": tensor, "by": "all_reduce"})
    yield from _without_stages(model, ranks)


def _without_stages(model: str, ranks: int) -> Iterator[Rival]:
    yield from (Rival("ddp", model, 1, {"MB": mb}) for mb in (1, 25))
    yield from (Rival("fsdp", model, 1, {"drop": drop, "ahead": 0}) for drop in (False, True))
    yield from (Rival("hsdp", model, n, {"drop": False, "ahead": 0}) for n in (2, 4) if n < ranks)
    yield from (Rival("grid", model, n, {"outside": "replicate", "sequence": True}) for n in (2, 4) if n < ranks)
    yield from (Rival("tp", model, ranks, {"sequence": long}) for long in (False, True))


def stepper(rival: Rival) -> Callable[[], Tensor]:
    """One step of this rank, on its part of the batch."""
    if rival.family == "pipe":
        return _pipe(rival)
    model, batch = made(rival.model)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    inner = rival.inner if rival.family in ("tp", "grid", "ep") else 1
    args, kwargs = tree_map(lambda tensor: tensor.chunk(ranks // inner)[rank // inner], (batch.args, batch.kwargs))
    run = _BUILDERS[rival.family](model, rival)
    optimizer = torch.optim.SGD(run.parameters(), RATE, foreach=False if rival.family == "ep" else None)
    whole = rival.family != "ep" and inner > 1 and whole_head(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if whole else nullcontext():
            loss = run(*args, **kwargs)
            loss.backward()
        optimizer.step()
        said = loss.detach()
        return said.full_tensor() if isinstance(said, DTensor) else said

    return step


def _ddp(model: nn.Module, rival: Rival) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=rival.settings["MB"], gradient_as_bucket_view=True)


def _fsdp(model: nn.Module, rival: Rival) -> nn.Module:
    outside = torch.distributed.get_world_size() // rival.inner
    mesh = init_device_mesh("cpu", (outside, rival.inner), mesh_dim_names=("replicas", "pieces")) \
        if rival.family == "hsdp" else init_device_mesh("cpu", (outside,))
    return _sharded(model, mesh, rival.settings["drop"], rival.settings["ahead"])


def _sharded(model: nn.Module, mesh: Any, drop: bool, ahead: int = 0) -> nn.Module:
    pieces: list[Any] = parts(model)
    for piece in pieces:
        fully_shard(piece, mesh=mesh, reshard_after_forward=drop)
    for i in range(len(pieces) if ahead else 0):
        pieces[i].set_modules_to_forward_prefetch(pieces[i + 1 : i + 1 + ahead])
        pieces[i].set_modules_to_backward_prefetch(pieces[max(0, i - ahead) : i][::-1])
    fully_shard(model, mesh=mesh, reshard_after_forward=drop)
    return model


def _tensor(model: nn.Module, rival: Rival) -> nn.Module:
    mesh = init_device_mesh("cpu", (rival.inner,))
    return parallelize_module(model, mesh, megatron(model, rival.settings["sequence"]))


def _grid(model: nn.Module, rival: Rival) -> nn.Module:
    outside = torch.distributed.get_world_size() // rival.inner
    mesh = init_device_mesh("cpu", (outside, rival.inner), mesh_dim_names=("data", "tensor"))
    cut = parallelize_module(model, mesh["tensor"], megatron(model, rival.settings["sequence"]))
    if rival.settings["outside"] == "shard":
        return _sharded(cut, mesh["data"], False)
    from torch.distributed._composable.replicate_with_fsdp import replicate
    for piece in parts(cut):
        replicate(piece, mesh=mesh["data"])
    replicate(cut, mesh=mesh["data"])
    return cut


def _expert(model: nn.Module, rival: Rival) -> nn.Module:
    """A mixture that transformers loads into its own expert parallel."""
    from transformers.distributed.configuration_utils import DistributedConfig

    assert isinstance(model, Loss)
    data, first = torch.distributed.get_world_size() // rival.inner, torch.distributed.get_rank() == 0
    where = [tempfile.mkdtemp() if first else ""]
    torch.distributed.broadcast_object_list(where)
    model.model.save_pretrained(where[0])  # the first rank does
    torch.distributed.barrier()
    loaded = type(model.model).from_pretrained(
        where[0], dtype=torch.float32, experts_implementation=model.model.config._experts_implementation,
        distributed_config=DistributedConfig(
            tp_size=rival.inner if rival.inner > 1 else None, fsdp_size=data, ep_size=rival.settings["experts"],
            ep_implementation=rival.settings["by"]))
    torch.distributed.barrier()
    if first:
        shutil.rmtree(where[0])
    return Loss(loaded.train())


SINGLE, DOUBLE = ("GPipe", "1F1B"), ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules of one stage a rank, and of two."""
SPLIT = DOUBLE[1:]
"""Those that split backward: with DDP, gradients of torch 2.13 are wrong then."""
VS = ("ZBVZeroBubble", "DualPipeV")
"""Those whose second stages lie in the opposite order."""


class _Stage(nn.Module):
    """Some blocks of a GPT, with what comes before the first and behind the last."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        first, last = stage == 0, stage == stages - 1
        self.tokens: nn.Module | None = model.tokens if first else None
        self.positions: nn.Module | None = model.positions if first else None
        self.blocks = model.blocks[stage * each:(stage + 1) * each]
        self.norm: nn.Module | None = model.norm if last else None
        self.head: nn.Module | None = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = x if self.norm is None or self.head is None else self.head(self.norm(x))
        return logits


def _parallel_stage(stage: "_Stage", mesh: Any, way: str) -> nn.Module:
    """A stage that the ranks of `mesh` train together, by one of torch's ways; itself where there is none."""
    if way == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    if way == "fsdp":
        for block in stage.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    if way == "tp":
        return parallelize_module(stage, mesh, {
            f"blocks.*.{name}": ColwiseParallel() if name in ("qkv", "up") else RowwiseParallel()
            for name in ("qkv", "o", "up", "down")})
    return stage


def _pipe(rival: Rival) -> Callable[[], Tensor]:
    """A step of torch's pipelining; a rank without the loss returns 0, one with it that times the stages' ranks."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    model, batch = made(rival.model)
    assert isinstance(model, GPT)
    world, rank, name = torch.distributed.get_world_size(), torch.distributed.get_rank(), rival.settings["schedule"]
    way, m, ranks = rival.settings.get("way", ""), rival.settings["parts"], world // rival.inner
    mesh = init_device_mesh("cpu", (ranks, rival.inner), mesh_dim_names=("pipe", "inner"))
    place, member = divmod(rank, rival.inner)
    own = [place, 2 * ranks - 1 - place if name in VS else place + ranks][:1 + (name in DOUBLE)]
    stages = ranks * len(own)
    ids, labels = (x.chunk(rival.inner)[member] if way in ("ddp", "fsdp") else x for x in batch.args)
    shape = (ids.shape[0] // m, ids.shape[1], model.norm.weight.shape[0])
    hidden, logits = (torch.empty((*shape[:2], n), requires_grad=True) for n in (shape[2], model.head.weight.shape[0]))
    parts = [_parallel_stage(_Stage(model, s, stages), mesh["inner"], way) for s in own]
    placed = [PipelineStage(part, s, stages, torch.device("cpu"), input_args=(hidden if s else ids[:shape[0]],),
                            output_args=(logits if s == stages - 1 else hidden,), group=mesh["pipe"].get_group())
              for part, s in zip(parts, own, strict=True)]
    schedule: Any = get_schedule_class(name)(
        placed if len(own) > 1 else placed[0], m,
        loss_fn=lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()))
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], RATE)

    def step() -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*((ids,) if 0 in own else ()), **(
            {"target": labels, "losses": losses} if stages - 1 in own else {}))
        optimizer.step()
        return torch.stack(losses).mean().detach() * ranks if losses else torch.zeros(())

    return step


_BUILDERS: dict[str, Callable[[nn.Module, Rival], nn.Module]] = {
    "ddp": _ddp, "fsdp": _fsdp, "hsdp": _fsdp, "tp": _tensor, "grid": _grid, "ep": _expert}
