"""Says a published run in the words of a plan: cluster, degrees, precision, optimizer, model and software profile.

What a row leaves out, or plans say otherwise:

    precision     a program whose gradients have two bytes trains in `bf16`, with master weights and both moments in the
                  optimizer (12 bytes a parameter); its update moves `Software.update` bytes a parameter. Any other
                  trains in `bf16-mixed`
    float32       everything is float32, with products at the peak of float32, or of tf32 where the row says so
    float16       has the prices of bfloat16, of which a device without it has the same peak
    float8        products with weights are narrow, but for the head, and cast what they read (`operators`)
    attention     a window of keys makes it shorter; fused attention of an older generation makes it longer
    recompute     the core of attention, every other operator, or modules are `selective`
"""

from dataclasses import dataclass, replace

from autoddl.core.degrees import Degrees
from autoddl.core.recompute import FULL, LIGHT, NO_RECOMPUTE, SELECTIVE
from autoddl.cost_models import Cluster
from autoddl.cost_models.profile import Profile
from autoddl.cost_models.software import Software, run_by
from autoddl.validation.clusters import cluster_of
from autoddl.validation.layers import Shape
from autoddl.validation.run_parts import Unpriced, check_degrees, model_shape, schedule_of, single_dtype
from autoddl.validation.runs import Run
from autoddl.validation.software import recomputation_of, software_of, splits_stream, visible_share

__all__ = ["RunPlan"]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run as the words that `plan` reads."""

    cluster: Cluster
    """Devices and links; programs are those of the software profile."""
    software: Software
    """What the training program does besides."""
    shape: Shape
    """The model with one microbatch of all ranks."""
    degrees: str
    """As `plan --mine` reads them."""
    precision: str
    """As `plan --precision` reads it."""
    optimizer: str
    """As `plan --optimizer` reads it."""
    microbatches: int
    """Microbatches of a step."""

    @classmethod
    def of(cls, run: Run, microbatch: int) -> "RunPlan":
        """The words of a run with `microbatch` sequences a rank. Raises Unpriced with the reason where there are none.
        """
        check_degrees(run)
        software = software_of(run)
        single = single_dtype(run)
        cluster = run_by(_with_dtypes(cluster_of(run), single), software, visible_share(run))
        precision, optimizer = ("float32", "adamw") if single else (software.precision, software.optimizer)
        return cls(cluster, software, model_shape(run, software, microbatch), str(_degrees(run)), precision, optimizer,
                   run.batch // (run.dp * microbatch))

    def under(self, profile: Profile) -> "RunPlan":
        """Returns the run on a machine with the constants of a profile. Raises InputError for another device's."""
        return replace(self, cluster=profile.on(self.cluster), software=profile.by(self.software))

    @property
    def recomputes_all(self) -> bool:
        """Whether backward computes whole layers again."""
        return Degrees.parse(self.degrees).recompute == FULL

    def without_recompute(self) -> "RunPlan":
        """Returns the run with nothing computed again but what its program always does."""
        return replace(self, degrees=str(replace(Degrees.parse(self.degrees), recompute=_least(self.software))))

    def check_schedule(self, run: Run) -> None:
        """Raises Unpriced where interleaving cannot have this number of microbatches."""
        if schedule_of(run)[1] > 1 and self.microbatches % run.pp:
            raise Unpriced(f"{self.microbatches} microbatches are no multiple of {run.pp} stages, which interleaving "
                           "needs")


def _least(software: Software) -> str:
    """What a program computes again at least: one by hand keeps shards of a sequence, and no insides of its kernels."""
    return LIGHT if software.by_hand else NO_RECOMPUTE


def _degrees(run: Run) -> Degrees:
    """The degrees of a run.

    In a pipeline gathered weights stay for all microbatches in flight, as under FSDP2 unless it is asked otherwise.
    """
    apart = run.ep if run.experts else 1
    least = _least(software_of(run))
    policy = {"": least, "none": least, "full": FULL}.get(recomputation_of(run), SELECTIVE)
    return Degrees(tp=run.tp, cp=run.cp, dp=run.dp, ep=apart, pp=run.pp, sp=splits_stream(run),
                   zero=min(run.zero_stage, 2 if run.pp > 1 else 3) if run.dp * run.cp > 1 else 0, recompute=policy)


def _with_dtypes(cluster: Cluster, single: str) -> Cluster:
    """The cluster whose bfloat16 stands for float16 where it has none, and tf32 for float32 where `single` says so.

    Raises Unpriced for a device without that rate.
    """
    peaks = dict(cluster.device.peaks)
    if single and single not in peaks:
        raise Unpriced(f"{cluster.device.name} lists no rate of {single}: write another precision, or a cluster file "
                       "with this rate")
    more = {"float32": peaks[single]} if single else {}
    if "bfloat16" not in peaks and "float16" in peaks:
        more["bfloat16"] = peaks["float16"]
    device = replace(cluster.device, peaks=tuple(sorted((peaks | more).items()))) if more else cluster.device
    return replace(cluster, device=device)
