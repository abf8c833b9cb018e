"""One published run as a value, and what makes it contradict itself."""

from dataclasses import dataclass

from autoddl.core.errors import InputError

__all__ = ["Run", "check_run"]


@dataclass(frozen=True, slots=True)
class Run:
    """One row of a table of published runs; `runs_file` reads it and fills in what the row leaves out."""

    row: str
    """Identifier of the row, else its line in the file."""
    source: str
    """Identifier of the publication."""
    model: str
    """Name of the model, as published."""
    workload: str
    """What kind of model it is, in the table's words: `GPT dense`, `MoE` ..."""
    framework: str
    """Name of the training program, as published."""
    layers: int
    """Transformer layers."""
    hidden: int
    """Width of the stream between layers."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int
    """Attention heads of keys and values."""
    ffn: int
    """Width between the two products of an MLP, or of one expert."""
    gated: bool
    """Whether the MLP multiplies by an activated gate (SwiGLU)."""
    vocab: int
    """Tokens of the vocabulary, without padding."""
    seq: int
    """Tokens of a sequence."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    top_k: int
    """Experts that a token goes to."""
    gpus: int
    """Devices."""
    dp: int
    """Degree of data parallelism."""
    tp: int
    """Degree of tensor parallelism."""
    pp: int
    """Degree of pipeline parallelism."""
    cp: int
    """Degree of context parallelism."""
    ep: int
    """Degree of expert parallelism, over the ranks of dp, cp and tp."""
    chunks: int
    """Chunks of layers per pipeline rank; 0 for as many as there are layers."""
    schedule: str
    """Name of the pipeline schedule; empty for 1F1B."""
    microbatch: int
    """Sequences of a microbatch on one rank; 0 where it is not stated."""
    batch: int
    """Sequences of a step, on all ranks."""
    recompute: str
    """What is computed again for backward, in the table's words and in small letters."""
    sequence_parallel: bool | None
    """Whether the stream between layers is split along the sequence over tp; None where it is not stated."""
    zero_stage: int
    """Stage of ZeRO, 0 to 3."""
    precision: str
    """Precision of products, in the table's words and in small letters."""
    device: str
    """Name of the device, as published."""
    gpus_per_node: int
    """Devices of a node."""
    link: str
    """Name of the link inside a node; empty for that of the reference system."""
    network: float
    """Bytes/s that a node sends; 0 for that of the reference system."""
    seconds: float
    """Measured seconds of a step."""
    peak_bytes: float
    """Measured peak bytes of a device; 0 where they are not stated."""
    notes: str
    """Anything else that the row says."""
    recomputed_share: float = 1.0
    """Share of the layers that full recomputation repeats."""
    head_dim: int = 0
    """Width of one head; 0 for hidden / heads. Of latent attention, the part of queries and keys that is not turned."""
    window: int = 0
    """Keys that a query sees in every other layer; 0 for all."""
    expert_bias: bool = False
    """Whether both products of an expert have biases."""
    clamped: bool = False
    """Whether experts clamp the gate and what it multiplies."""
    qk_norm: bool = False
    """Whether every head of queries and keys is normalised."""
    yarn: bool = False
    """Whether positions are scaled as YaRN does, whose factor is part of the rotation."""
    graphs: bool = False
    """Whether the whole step is replayed from CUDA graphs."""
    q_rank: int = 0
    """Width of the row that queries of latent attention are made from; 0 for the stream."""
    kv_rank: int = 0
    """Width of the row that keys and values are made from; 0 where attention is not latent."""
    rope_dim: int = 0
    """Width of the part of queries and keys of latent attention that is turned."""
    v_dim: int = 0
    """Width of the values of a head of latent attention."""
    shared_ffn: int = 0
    """Width of an MLP that every token passes besides its experts; 0 for none."""
    overlap: frozenset[str] | None = None
    """Degrees whose messages are sent beside computation, of OVERLAPS; None: as the program does by default."""
    cluster: str = ""
    """Text of the cluster's file; empty where device, link and network say what it is."""

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads


OVERLAPS = ("tp", "dp", "cp", "ep")
"""Degrees of parallelism of which a program may send messages beside computation."""


def check_run(run: Run, where: str) -> None:
    """Raises InputError, with the place `where`, unless degrees multiply to the GPUs and batch and heads divide."""
    ranks = run.dp * run.tp * run.pp * run.cp
    if ranks != run.gpus:
        raise InputError(f"{where}: dp {run.dp} * tp {run.tp} * pp {run.pp} * cp {run.cp} = {ranks}, but n_gpus is "
                         f"{run.gpus}; let the degrees multiply to the GPUs")
    if run.batch % (run.dp * max(1, run.microbatch)):
        raise InputError(f"{where}: a global batch of {run.batch} is no multiple of dp {run.dp} * microbatch "
                         f"{run.microbatch}; let it divide")
    if run.experts and not 1 <= run.top_k <= run.experts:
        raise InputError(f"{where}: moe_topk is {run.top_k}; each token goes to 1 to {run.experts} of the experts")
    if run.experts % run.ep:
        raise InputError(f"{where}: {run.experts} experts are no multiple of ep {run.ep}; let them divide")
    if run.heads % run.kv_heads:
        raise InputError(f"{where}: {run.heads} heads are no multiple of {run.kv_heads} kv_heads; let them divide")
    _check_parts(run, where)


def _check_parts(run: Run, where: str) -> None:
    """Raises InputError for a shared MLP without experts, and for a part of the widths of latent attention."""
    if run.shared_ffn and not run.experts:
        raise InputError(f"{where}: shared_ffn is {run.shared_ffn}, and the row has no experts that it stands beside; "
                         "fill moe_experts and moe_topk, or write the MLP's width as ffn")
    needed = {"kv_rank": run.kv_rank, "rope_dim": run.rope_dim, "v_dim": run.v_dim}
    told = [name for name, width in {"q_rank": run.q_rank, **needed}.items() if width]
    missing = [name for name, width in needed.items() if not width]
    if told and missing:
        verb = "is" if len(told) == 1 else "are"
        raise InputError(f"{where}: {' and '.join(told)} {verb} of latent attention, which has a {missing[0]} too; "
                         f"fill {', '.join(missing)}, or write 0 in all four")
