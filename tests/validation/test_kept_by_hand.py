"""Programs by hand keep of a layer what their papers count, and gather the rest again (Korthikanti et al. 2022).

Of a layer of Llama on one of t ranks, of s tokens in b sequences of width h, feed-forward width f, and k of a heads of
keys, in half precision, with norms' statistics and attention's sums in float32:

    bytes = s b / t * (2 h stream + 2 h norm + 2 h (1 + 2 k / a) packed + 2 h + 2 h k / a turned + 2 h + 4 a sums
                       + 2 h stream + 2 h norm + 4 f gate and up + 2 f product) + 8 s b / t statistics

With nothing computed again a rank also has both gathered copies whole, 4 h (t - 1) / t more, and the gate's 2 f / t, at
least.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from published import run

from autoddl.core.recompute import LIGHT, NO_RECOMPUTE
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.validation.as_plan import flat_plan
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.templates import model_graph

LENGTH, WIDTH, HIDDEN, HEADS, KEYS, RANKS = 8192, 4096, 14336, 32, 8, 4

ROW = {"framework": "NeMo", "n_gpus": RANKS, "dp": 1, "tp": RANKS, "layers": 2, "hidden": WIDTH, "ffn": HIDDEN,
       "heads": HEADS, "kv_heads": KEYS, "vocab": 4096, "seq": LENGTH, "seq_parallel": 1, "gated_ffn": 1,
       "microbatch": 1, "global_batch": 4, "precision": "bf16", "gpu_type": "H100-SXM5-80GB", "recompute": "none"}


def kept_by_a_layer(asked: RunPlan) -> float:
    """Bytes that one more microbatch in flight keeps of one more layer."""
    def peak(layers: int, in_flight: int) -> float:
        chosen = flat_plan(asked, model_graph(asked.shape, layers, asked.precision))
        plan = replace(chosen.plan, in_flight=in_flight)
        return with_memory_peak(plan, chosen.graph, asked.optimizer, asked.cluster).predicted.peak_bytes

    return (peak(3, 3) - peak(3, 2)) - (peak(2, 3) - peak(2, 2))


def test_a_layer_keeps_shards_and_no_insides_of_kernels(tmp_path: Path) -> None:
    asked = RunPlan.of(run(tmp_path, **ROW), 1)
    assert f"recompute={LIGHT}" in asked.degrees
    tokens, share = LENGTH / RANKS, KEYS / HEADS
    stream, packed, turned, out = 2 * WIDTH, 2 * WIDTH * (1 + 2 * share), 2 * WIDTH * (1 + share), 2 * WIDTH
    light = tokens * (stream + 2 * WIDTH + packed + turned + out + 4 * HEADS
                      + stream + 2 * WIDTH + 4 * HIDDEN + 2 * HIDDEN + 8)
    assert kept_by_a_layer(asked) == pytest.approx(light, rel=0.01)
    whole = replace(asked, degrees=asked.degrees.replace(f"recompute={LIGHT}", f"recompute={NO_RECOMPUTE}"))
    more = tokens * (2 * 2 * WIDTH * (RANKS - 1) + 2 * HIDDEN)
    assert kept_by_a_layer(whole) > 0.99 * (light + more)
