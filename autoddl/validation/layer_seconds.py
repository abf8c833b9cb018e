"""Seconds of one layer of a published run, forward and backward, on the device and on the host.

    F, B, W    forward, backward to the inputs, backward to the weights, each with what it sends
    forward    max(device, host * operators + host_forward);  backward likewise
    overlap    max(a, b) + (SLOWDOWN - 1) min(a, b): what runs at once slows both (Miao et al. 2022, Galvatron, 3.4)
    recompute  full adds F to B, by core, operators or modules that share of F (`Part`)
    waits      where the host waits for the experts' activation it is ahead of the device only since the last wait. What
               the device does between the tokens' order and that wait comes behind what the host did before.
    context    keys and values go round beside attention where the program does that; the rest is exposed
    experts    exchanging tokens runs beside computation where the program does that, which needs another microbatch or
               chunk of layers at hand
"""

from typing import NamedTuple

from autoddl.cost_models.software import SLOWDOWN, Software
from autoddl.validation.part import Part
from autoddl.validation.runs import Run
from autoddl.validation.software import recomputation_of

__all__ = ["LayerSeconds", "layer_seconds", "overlap_seconds"]

BACKWARD_CORE = 2.5
"""Backward of fused attention over its forward (Dao 2023): five products instead of two."""


class LayerSeconds(NamedTuple):
    """Seconds of one layer and microbatch."""

    forward: float
    backward: float
    weight: float


def overlap_seconds(a: float, b: float) -> float:
    """Returns the seconds of two things at once that take `a` and `b` seconds alone."""
    return max(a, b) + (SLOWDOWN - 1) * min(a, b)


def layer_seconds(run: Run, software: Software, part: Part) -> LayerSeconds:
    """Returns F, B and W of one layer with what it sends and computes again."""
    forward = _with_experts(run, software, _with_tensor(run, software, part.forward, part.sent_forward),
                            part.dispatch_forward)
    backward = _with_experts(run, software, _with_tensor(run, software, part.backward + part.weight,
                                                         part.sent_backward), part.dispatch_backward)
    forward += _exposed_context(software, part.core, part.context / 3)
    backward += _exposed_context(software, BACKWARD_CORE * part.core, part.context * 2 / 3)
    forward = _behind_host(software, part, forward)
    backward = max(software.host * part.backward_operators + part.host_backward, backward) - part.weight
    return LayerSeconds(forward, backward + _recomputed(run, part, forward), part.weight)


def _with_tensor(run: Run, software: Software, computed: float, sent: float) -> float:
    """Computation with the messages of tensor parallelism."""
    overlaps = "tp" in software.overlaps and run.sequence_parallel
    return overlap_seconds(computed, sent) if overlaps else computed + sent


def _with_experts(run: Run, software: Software, computed: float, sent: float) -> float:
    """Computation with the exchange among experts."""
    overlaps = "ep" in software.overlaps and (run.pp == 1 or run.chunks != 1)
    return overlap_seconds(computed, sent) if overlaps else computed + sent


def _exposed_context(software: Software, attention: float, sent: float) -> float:
    """Seconds of the messages of context parallelism beyond attention."""
    return overlap_seconds(attention, sent) - attention if "cp" in software.overlaps else sent


def _behind_host(software: Software, part: Part, device: float) -> float:
    """Forward of device and host: the longer, or what the device does before a wait behind the rest of the host's."""
    host = software.host * part.operators + part.host_forward
    return max(device, host, host - software.host * part.awaited_operators + part.awaited)


def _recomputed(run: Run, part: Part, forward: float) -> float:
    """Seconds that backward computes again."""
    match recomputation_of(run):
        case "full":
            return run.recomputed_share * forward
        case "core":
            return part.core
        case "operators":
            return part.repeated + part.sent_forward / 2
        case "modules":
            return part.modules
    return 0.0
