"""Reads a table of published runs: a CSV file -> `Run` values.

`NEEDED` lists the columns that every table must have, `COLUMNS` all columns that are read (docs/runs_table.md explains
each). Those of `DESCRIPTIVE` are for people, and so is any whose name begins with `x_`; another one is an error.
`MEASURED` are the ways to say how long a step took, and `MACHINE` those to say what it ran on.

An empty field stands for

    cp, ep, interleave_vp   1                                 kv_heads   as many as heads
    vocab                   51200 (GPT-2's, padded)           ffn        4 * hidden
    zero_stage, window      0                                 head_dim   hidden / heads
    q_rank, kv_rank, rope_dim, v_dim, shared_ffn              0: no latent attention, no MLP beside the experts
    recompute               none, or as many layers as do not fit the device otherwise (`validate`)
    microbatch              the fastest power of two that divides the batch and fits the device (`validate`)
    intra_link, inter_Gbps_per_node    those of the reference system of the device's generation (`systems.yaml`)

and without a precision a run stays unpriced. Of some models `models.yaml` knows head_dim, window, norms of heads, YaRN,
latent attention, and the biases, clamps and shared width of experts. A filled field overrides it.

Words are read whatever their case. 1, 1.0, true and yes are yes; 0, 0.0, false, no and nothing are no. A row that
contradicts itself is an error: the whole table is checked before anything is priced.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.validation.clusters import cluster_of, node_of
from autoddl.validation.facts import find_beginning, read_facts
from autoddl.validation.run_parts import SINGLE
from autoddl.validation.runs import OVERLAPS, Run, check_run
from autoddl.validation.scores import step_flops

__all__ = ["COLUMNS", "DESCRIPTIVE", "MACHINE", "MEASURED", "MODELS", "NEEDED", "ModelFacts", "model_facts",
           "read_runs"]

NEEDED = ("model", "layers", "hidden", "heads", "n_gpus", "dp", "tp", "pp", "seq", "global_batch")
MEASURED = ("iter_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
"""Columns that say how long a step took, the first that is filled counts."""
MACHINE = ("gpu_type", "cluster")
COLUMNS = (*NEEDED, *MEASURED, *MACHINE, "source_id", "row_id", "workload", "framework", "kv_heads", "ffn",
           "gated_ffn", "vocab", "moe_experts", "moe_topk", "cp", "ep", "interleave_vp", "schedule", "microbatch",
           "recompute", "seq_parallel", "zero_stage", "precision", "head_dim", "window", "expert_bias", "clamped",
           "qk_norm", "yarn", "q_rank", "kv_rank", "rope_dim", "v_dim", "shared_ffn", "cuda_graphs", "overlap",
           "gpus_per_node", "intra_link", "inter_Gbps_per_node", "peak_mem_GB", "notes")
DESCRIPTIVE = ("source", "from_memory", "config_complete", "quality", "params_b", "grad_accum", "zero_group", "offload",
               "intra_GBps_per_gpu_unidir", "inter_link", "iter_time_basis", "tflops_kind")
"""Columns that a table may have for its readers."""
OWN = "x_"
"""Beginning of the names of columns that are anybody's own."""

PRODUCTS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
            "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", **SINGLE}
"""Beginning of the precision -> dtype at whose peak products are."""
RECOMPUTE = ("none", "full", "selective", "modules", "recipe", "not stated")
"""Beginnings of what is computed again."""
YES, NO = ("1", "1.0", "true", "yes"), ("", "0", "0.0", "false", "no")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that its name tells; the fields are those of `Run`."""

    head_dim: int = 0
    window: int = 0
    expert_bias: bool = False
    clamped: bool = False
    qk_norm: bool = False
    yarn: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    shared_ffn: int = 0


MODELS: Mapping[str, ModelFacts] = {name: ModelFacts(**row) for name, row in read_facts("models.yaml").items()}
"""Beginning of a model's name -> the facts about it."""


def model_facts(model: str) -> ModelFacts:
    """Returns the facts about a model by the beginning of its name; the defaults for any other.

    A space or an underscore is read as a hyphen, and of `owner/name` the name."""
    return MODELS.get(find_beginning(re.sub("[ _]", "-", model.rpartition("/")[2].strip()), MODELS), ModelFacts())


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """Reads all rows of a CSV file with a head; raises InputError that names the file, the row and the column."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            _check_columns(reader.fieldnames or (), path)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the runs {str(path)!r}: {reason}; give the path of a CSV file") from None
    if not rows:
        raise InputError(f"{path}: no rows below the head; write one run per line")
    texts = _cluster_texts(path, {row.get("cluster") or "" for row in rows})
    return tuple(_run({key: value or "" for key, value in row.items() if key} |
                      {"cluster": texts[row.get("cluster") or ""]}, f"{path}: row {i + 2}")
                 for i, row in enumerate(rows))


def _check_columns(names: Sequence[str], path: str | Path) -> None:
    """Raises InputError for a column that is missing, and for one that nothing reads."""
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputError(f"{path}: the column {missing[0]!r} is missing; a table of runs has {', '.join(NEEDED)}, one "
                         f"of {', '.join(MEASURED)}, and one of {', '.join(MACHINE)}")
    for some, what in ((MEASURED, "how long a step took"), (MACHINE, "what it ran on")):
        if not set(some) & set(names):
            raise InputError(f"{path}: no column says {what}; add one of {', '.join(some)}")
    known = (*COLUMNS, *DESCRIPTIVE)
    for name in names:
        if name not in known and not name.startswith(OWN):
            near = near_names(name, known, f"a column of your own has a name that begins with {OWN}, like {OWN}{name}",
                              most=1)
            raise InputError(f"{path}: nothing reads the column {name!r}; {near}")


def _cluster_texts(path: str | Path, names: Iterable[str]) -> dict[str, str]:
    """By name of a cluster file, beside the table or absolute, its text as `load_cluster` reads it."""
    return {name: load_cluster(Path(path).parent / name).to_yaml() if name else "" for name in names}


def _number(row: Mapping[str, str], name: str, where: str, default: float | None = None) -> float:
    text = row.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value == 0 and default != 0):
        least = "0 or more" if default == 0 else "a number above 0"
        raise InputError(f"{where}: {name} is {text!r}; write {least}" + " or leave it empty" * (default is not None))
    return value


def _whole(row: Mapping[str, str], name: str, where: str, default: int | None = None) -> int:
    value = _number(row, name, where, None if default is None else float(default))
    if value != int(value):
        raise InputError(f"{where}: {name} is {row[name]!r}; write a whole number")
    return int(value)


def _run(row: Mapping[str, str], where: str) -> Run:
    """Reads one row, which `where` names, and checks it."""
    name = f"{where} (row_id {row['row_id']})" if row.get("row_id") else where

    def whole(column: str, default: int | None = None) -> int:
        return _whole(row, column, name, default)

    def fact(column: str, known: int) -> int:
        return whole(column, 0) if row.get(column, "").strip() else known

    heads, hidden, facts = whole("heads"), whole("hidden"), model_facts(row["model"])
    chunks, device = _chunks(row, name), _device_name(row, name)
    run = Run(
        row=row.get("row_id", "") or where.rpartition(" ")[2], source=row.get("source_id", ""), model=row["model"],
        workload=row.get("workload", ""), framework=row.get("framework", ""), layers=whole("layers"), hidden=hidden,
        heads=heads, kv_heads=whole("kv_heads", heads), ffn=whole("ffn", 4 * hidden),
        gated=_flag(row, "gated_ffn", name), vocab=whole("vocab", 51200), seq=whole("seq"),
        experts=whole("moe_experts", 0), top_k=whole("moe_topk", 0), gpus=whole("n_gpus"), dp=whole("dp"),
        tp=whole("tp"), pp=whole("pp"), cp=whole("cp", 1), ep=whole("ep", 1),
        chunks=chunks, schedule=row.get("schedule", ""),
        microbatch=whole("microbatch", 0), batch=whole("global_batch"), recompute=_recompute(row, name),
        sequence_parallel=_flag(row, "seq_parallel", name) if row.get("seq_parallel", "").strip() else None,
        zero_stage=_stage(row.get("zero_stage", ""), name),
        precision=row.get("precision", "").strip().lower().removeprefix("mixed").lstrip(" -"),
        device=device, cluster=row["cluster"],
        gpus_per_node=whole("gpus_per_node", node_of(device, whole("n_gpus"))),
        link=row.get("intra_link", "").strip(),
        network=_number(row, "inter_Gbps_per_node", name, 0.0) * 1e9 / 8,
        seconds=1.0, peak_bytes=_number(row, "peak_mem_GB", name, 0.0) * 1e9,
        notes=row.get("notes", ""), head_dim=fact("head_dim", facts.head_dim),
        window=fact("window", facts.window), q_rank=fact("q_rank", facts.q_rank),
        kv_rank=fact("kv_rank", facts.kv_rank), rope_dim=fact("rope_dim", facts.rope_dim),
        v_dim=fact("v_dim", facts.v_dim),
        shared_ffn=fact("shared_ffn", facts.shared_ffn if row.get("moe_experts", "").strip() else 0),
        expert_bias=_flag(row, "expert_bias", name, facts.expert_bias),
        clamped=_flag(row, "clamped", name, facts.clamped), qk_norm=_flag(row, "qk_norm", name, facts.qk_norm),
        yarn=_flag(row, "yarn", name, facts.yarn), graphs=_flag(row, "cuda_graphs", name),
        overlap=_overlap(row.get("overlap", ""), name))
    check_run(run, name)
    run = replace(run, seconds=_seconds(row, run, name))
    _check_rate(run, name)
    return run


def _seconds(row: Mapping[str, str], run: Run, where: str) -> float:
    """Seconds of a step, from the first column of `MEASURED` that is filled; a rate is that of the model's flops."""
    column = next((one for one in MEASURED if row.get(one, "").strip()), "")
    if not column:
        raise InputError(f"{where}: nothing says how long a step took; fill one of {', '.join(MEASURED)}")
    value, tokens = _number(row, column, where), float(run.batch * run.seq)
    match column:
        case "iter_time_s":
            return value
        case "tokens_per_s":
            return tokens / value
        case "tokens_per_s_per_gpu":
            return tokens / (value * run.gpus)
        case "tflops_per_gpu":
            return step_flops(run) / (value * 1e12 * run.gpus)
    peak = _peak(run)
    if peak is None or value > 100:
        raise InputError(f"{where}: mfu_pct is {value:g}, of a peak that is "
                         + ("not known; fill another of " + ", ".join(MEASURED) if peak is None else
                            "100; write per cent of the peak"))
    return step_flops(run) / (value / 100 * peak * run.gpus)


def _peak(run: Run) -> float | None:
    """Peak flop/s of a run's device for its products; None where device or precision are not known."""
    name = find_beginning(run.precision, PRODUCTS)
    try:
        return cluster_of(run).device.peak(PRODUCTS[name]) if name else None
    except InputError:
        return None


def _check_rate(run: Run, where: str) -> None:
    """Raises InputError for a run that is faster than its devices' peak, with attention that sees half of the keys."""
    peak, rate = _peak(run), step_flops(run, min(0.5, run.window / run.seq if run.window else 0.5)) / (
        run.seconds * run.gpus)
    if peak is not None and rate > peak:
        raise InputError(f"{where}: {run.seconds:g} s a step are {rate / 1e12:.0f} TFLOP/s a device, above the peak "
                         f"of {peak / 1e12:.0f} of {run.device}; look at the unit of the time or rate, at "
                         "global_batch, at n_gpus and at precision")


def _flag(row: Mapping[str, str], name: str, where: str, default: bool = False) -> bool:
    text = row.get(name, "").strip().lower()
    if text not in (*YES, *NO):
        raise InputError(f"{where}: {name} is {row[name]!r}; write 1 or 0, or leave it empty")
    return text in YES if text else default


def _chunks(row: Mapping[str, str], where: str) -> int:
    """Chunks of layers of a pipeline rank; 0 for as many as there are layers.

    That is so too where a schedule is interleaved and nothing says how often.
    """
    text, interleaved = row.get("interleave_vp", "").strip(), row.get("schedule", "").lower().startswith("interleaved")
    return 0 if text.startswith("max") or (interleaved and not text) else _whole(row, "interleave_vp", where, 1)


def _device_name(row: Mapping[str, str], where: str) -> str:
    """The device of the row, or that of its cluster file."""
    named, cluster = row.get("gpu_type", "").strip(), row["cluster"]
    if bool(named) == bool(cluster):
        raise InputError(f"{where}: a row says what it ran on by gpu_type or by cluster, and this one has "
                         f"{'both' if named else 'neither'}; fill one")
    return named or parse_cluster(cluster, where).device.name


def _recompute(row: Mapping[str, str], where: str) -> str:
    """The words in small letters; a plain yes is full."""
    words = row.get("recompute", "").strip().lower()
    known = "full" if words in YES else "none" if words in NO and words else words
    if not known.startswith(RECOMPUTE) and known:
        raise InputError(f"{where}: recompute is {row['recompute']!r}; begin with none, full or selective, or leave it "
                         "empty where it is not stated")
    return known


def _overlap(text: str, where: str) -> frozenset[str] | None:
    """The degrees whose messages are sent beside computation; None where the row does not tell."""
    words = text.lower().split()
    if words != ["none"] and not {*words} <= {*OVERLAPS}:
        raise InputError(f"{where}: overlap is {text!r}; write some of {' '.join(OVERLAPS)}, or none, or leave it "
                         "empty")
    return frozenset({*words} - {"none"}) if words else None


def _stage(text: str, where: str) -> int:
    """The stage of ZeRO: `1 (distributed optimizer)` is 1."""
    first = text.strip()[:1] or "0"
    if first not in "0123":
        raise InputError(f"{where}: zero_stage is {text!r}; begin with 0, 1, 2 or 3, or leave it empty")
    return int(first)
