"""Everything AutoDDL raises on purpose, as a tree.

AutoDDLError
  x InputError            what was written or given is wrong: says the value, the rule and the way out
      x CaptureError      the model cannot be captured: names the operator and the user's source line
      x MismatchError     a plan for another model, cluster, version, world size or batch
  x Infeasible            no plan fits the memory: carries the bytes needed and the budget
  x MachineError          a process, link or collective failed while running

Anything else that escapes is a bug of ours.
"""

__all__ = ["AutoDDLError", "CaptureError", "Infeasible", "InputError", "MachineError", "MismatchError"]


class AutoDDLError(Exception):
    """The root: one clear sentence, shown without a traceback by the shell."""


class InputError(AutoDDLError):
    """What was written or given is wrong."""


class CaptureError(InputError):
    """The model cannot be captured as a graph."""


class MismatchError(InputError):
    """A plan meets a model, cluster, version, world or batch that it was not made for."""


def _bytes(count: float) -> str:
    """`12.3 GB`: what is near the budget is told apart."""
    unit, size = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= s), ("bytes", 1.0))
    return f"{count / size:.6g} {unit}"


class Infeasible(AutoDDLError):
    """No choice fits: `needed` is the least bytes per device that any choice takes, `budget` what there is."""

    def __init__(self, needed: float, budget: float, detail: str = "") -> None:
        self.needed, self.budget, self.detail = needed, budget, detail
        hint = detail or "use more devices, a smaller batch, or a larger budget"
        super().__init__(
            f"no plan fits: the least any plan needs is {_bytes(needed)} per device, "
            f"the budget is {_bytes(budget)}; {hint}"
        )

    def __reduce__(self) -> tuple[type["Infeasible"], tuple[float, float, str]]:
        return type(self), (self.needed, self.budget, self.detail)


class MachineError(AutoDDLError):
    """A process, a link or a collective failed while running."""
