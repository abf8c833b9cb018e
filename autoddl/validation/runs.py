"""Published runs as a table: a CSV file -> `Run` values.

Needed columns: source_id, model, layers, hidden, heads, n_gpus, dp, tp, pp, seq, global_batch, gpu_type, iter_time_s;
`COLUMNS` lists all that are read, any other is ignored. Where a field is empty:

    cp, ep, chunks          1                                 kv_heads   as many as heads
    vocab                   51200 (GPT-2's, padded)           ffn        4 * hidden
    zero_stage              0
    head_dim                that of `HEADS` for the family of the model, else hidden / heads
    recompute               none, and if that does not fit the device as many layers as do not; an empty precision
                            leaves a run unpriced
    microbatch              found: the fastest power of two that divides the batch and fits the device (`validate`)
    links                   those of the reference system of the device's generation (`validate_places`)

Words are read whatever their case. 1, 1.0, true and yes are yes; 0, 0.0, false, no and nothing are no.

A row that contradicts itself is an error: a table is checked before anything is priced.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from autoddl.core.errors import InputError

__all__ = ["COLUMNS", "NEEDED", "Run", "read_runs"]

NEEDED = ("source_id", "model", "layers", "hidden", "heads", "n_gpus", "dp", "tp", "pp", "seq", "global_batch",
          "gpu_type", "iter_time_s")
COLUMNS = (*NEEDED, "row_id", "workload", "framework", "kv_heads", "ffn", "gated_ffn", "vocab", "moe_experts",
           "moe_topk", "cp", "ep", "interleave_vp", "schedule", "microbatch", "recompute", "seq_parallel", "zero_stage",
           "precision", "head_dim", "gpus_per_node", "intra_link", "inter_Gbps_per_node", "peak_mem_GB", "notes")

YES, NO = ("1", "1.0", "true", "yes"), ("", "0", "0.0", "false", "no")

HEADS: Mapping[str, int] = MappingProxyType({"Qwen3": 128, "GPT-OSS": 64})
"""Beginning of a model's name -> size of its heads, where it is not hidden / heads (config.json of the families)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One row. Sizes are counts, `seconds` the measured step, `peak_bytes` the measured peak, 0 where not told.
    `tuned` is a factor on the efficiency of the device, for fits; `again` the share of layers that full recomputation
    takes in; `head` the size of a head."""

    row: str
    source: str
    model: str
    workload: str
    framework: str
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    experts: int
    top: int
    gpus: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    chunks: int
    schedule: str
    microbatch: int
    batch: int
    recompute: str
    sequence: bool
    zero: int
    precision: str
    device: str
    node: int
    link: str
    network: float
    seconds: float
    peak_bytes: float
    notes: str
    tuned: float = 1.0
    again: float = 1.0
    head: int = 0


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """All rows of a CSV file with a head."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}: the column {missing[0]!r} is missing; a table of runs has "
                                 f"{', '.join(NEEDED)}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the runs {str(path)!r}: {reason}; give the path of a CSV file") from None
    if not rows:
        raise InputError(f"{path}: no rows below the head; write one run per line")
    return tuple(_run({key: value or "" for key, value in row.items() if key}, f"{path}: row {i + 2}")
                 for i, row in enumerate(rows))


def _number(row: Mapping[str, str], name: str, where: str, default: float | None = None) -> float:
    text = row.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value == 0 and default != 0):
        raise InputError(f"{where}: {name} is {text!r}; write a number above 0"
                         + ("" if default is None else " or leave it empty"))
    return value


def _whole(row: Mapping[str, str], name: str, where: str, default: int | None = None) -> int:
    value = _number(row, name, where, None if default is None else float(default))
    if value != int(value):
        raise InputError(f"{where}: {name} is {row[name]!r}; write a whole number")
    return int(value)


def _run(row: Mapping[str, str], where: str) -> Run:
    """One row, checked."""
    name = f"{where} (row_id {row['row_id']})" if row.get("row_id") else where

    def whole(column: str, default: int | None = None) -> int:
        return _whole(row, column, name, default)

    heads, hidden, schedule = whole("heads"), whole("hidden"), row.get("schedule", "")
    chunks = row.get("interleave_vp", "").strip()
    run = Run(
        row=row.get("row_id", "") or where.rpartition(" ")[2], source=row["source_id"], model=row["model"],
        workload=row.get("workload", ""), framework=row.get("framework", ""), layers=whole("layers"), hidden=hidden,
        heads=heads, groups=whole("kv_heads", heads), ffn=whole("ffn", 4 * hidden),
        gated=_flag(row, "gated_ffn", name), vocab=whole("vocab", 51200), seq=whole("seq"),
        experts=whole("moe_experts", 0), top=whole("moe_topk", 0), gpus=whole("n_gpus"), dp=whole("dp"),
        tp=whole("tp"), pp=whole("pp"), cp=whole("cp", 1), ep=whole("ep", 1),
        chunks=0 if chunks.startswith("max") else whole("interleave_vp", 1), schedule=schedule,
        microbatch=whole("microbatch", 0), batch=whole("global_batch"), recompute=_recompute(row.get("recompute", "")),
        sequence=_flag(row, "seq_parallel", name), zero=_stage(row.get("zero_stage", ""), name),
        precision=row.get("precision", "").strip().lower().removeprefix("mixed").lstrip(" -"),
        device=row["gpu_type"].strip(), node=whole("gpus_per_node", 8), link=row.get("intra_link", "").strip(),
        network=_number(row, "inter_Gbps_per_node", name, 0.0) * 1e9 / 8,
        seconds=_number(row, "iter_time_s", name), peak_bytes=_number(row, "peak_mem_GB", name, 0.0) * 1e9,
        notes=row.get("notes", ""), head=whole("head_dim", _head(row["model"])))
    _check(run, name)
    return run


def _flag(row: Mapping[str, str], name: str, where: str) -> bool:
    text = row.get(name, "").strip().lower()
    if text not in (*YES, *NO):
        raise InputError(f"{where}: {name} is {row[name]!r}; write 1 or 0, or leave it empty")
    return text in YES


def _recompute(text: str) -> str:
    """In small letters; a plain yes is full."""
    words = text.strip().lower()
    return "full" if words in YES else "none" if words in NO and words else words


def _stage(text: str, where: str) -> int:
    """Of ZeRO: `1 (distributed optimizer)` is 1."""
    first = text.strip()[:1] or "0"
    if first not in "0123":
        raise InputError(f"{where}: zero_stage is {text!r}; begin with 0, 1, 2 or 3, or leave it empty")
    return int(first)


def _head(model: str) -> int:
    return next((HEADS[name] for name in HEADS if model.startswith(name)), 0)


def _check(run: Run, where: str) -> None:
    """dp tp pp cp = GPUs; batches and heads divide."""
    ranks = run.dp * run.tp * run.pp * run.cp
    if ranks != run.gpus:
        raise InputError(f"{where}: dp {run.dp} * tp {run.tp} * pp {run.pp} * cp {run.cp} = {ranks}, but n_gpus is "
                         f"{run.gpus}; let the degrees multiply to the GPUs")
    if run.batch % (run.dp * max(1, run.microbatch)):
        raise InputError(f"{where}: a global batch of {run.batch} is no multiple of dp {run.dp} * microbatch "
                         f"{run.microbatch}; let it divide")
    if run.experts and not 1 <= run.top <= run.experts:
        raise InputError(f"{where}: moe_topk is {run.top}; each token goes to 1 to {run.experts} of the experts")
    if run.experts % run.ep:
        raise InputError(f"{where}: {run.experts} experts are no multiple of ep {run.ep}; let them divide")
    if run.heads % run.groups:
        raise InputError(f"{where}: {run.heads} heads are no multiple of {run.groups} kv_heads; let them divide")
