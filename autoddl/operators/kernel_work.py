"""Holds the work of a kernel: what `work` counts, and the cost model prices."""

from dataclasses import dataclass

__all__ = ["KernelWork"]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel on one device."""

    flops: float
    """Floating point operations; 0 for kernels that are bound by memory."""
    nbytes: float
    """Bytes read and written."""
    kind: str = "memory"
    """The kind of kernel, as in `cost_models.Kernel`."""
    shape: tuple[int, ...] = ()
    """The sizes that the kind calls for, as in `cost_models.Kernel`."""
    weight: bool = False
    """Whether it computes the gradient of a parameter-like factor, for which no earlier op waits."""
    name: str = ""
    """The measured curve that it follows (`kernel_kinds`)."""
    dtype: str = ""
    """The dtype in which it computes, where that is not the op's."""
    times: int = 1
    """How often it runs, one run after another; flops and bytes are of one."""

    @property
    def all_flops(self) -> float:
        """Floating point operations of all its runs."""
        return self.flops * self.times
