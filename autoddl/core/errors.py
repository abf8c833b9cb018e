"""Every error that AutoDDL raises on purpose, as a tree.

    AutoDDLError
      InputError            an input is wrong: says the value, the rule and the way out
        CaptureError        the model cannot be captured: names the operator and the user's source line
        MismatchError       the plan is for another model, cluster, version, world size or batch
      Infeasible            no plan fits the memory: carries the bytes needed and the budget
      MachineError          a process, link or collective failed while running

Any other exception that escapes is a bug of ours.
"""

__all__ = ["AutoDDLError", "CaptureError", "Infeasible", "InputError", "MachineError", "MismatchError"]


class AutoDDLError(Exception):
    """The root of the tree. Its text is one clear sentence, which the shell shows without a traceback."""


class InputError(AutoDDLError):
    """An argument, an option or a file is wrong."""


class CaptureError(InputError):
    """The model cannot be captured as a graph."""


class MismatchError(InputError):
    """The plan was made for another model, cluster, version, number of ranks or batch."""


def _bytes(count: float) -> str:
    """`12.3456 GB`: with enough digits to tell the need from a budget that is nearly as large."""
    unit, size = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= s), ("bytes", 1.0))
    return f"{count / size:.6g} {unit}"


class Infeasible(AutoDDLError):
    """No plan fits. `needed` is the least bytes per device that any plan takes, `budget` the bytes that there are."""

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
