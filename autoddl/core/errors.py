"""Every error that AutoDDL raises on purpose, as a tree.

    AutoDDLError
      InputError            an input is wrong: says the value, the rule and the way out
        CaptureError        the model cannot be captured: names the operator and the user's source line
        MismatchError       the plan is for another model, cluster, version, world size or batch
      Infeasible            no plan fits the memory: carries the bytes needed and the budget
      MachineError          a process, link or collective failed while running
        PeerError           this process is well, and another one or a link is not

Any other exception that escapes is a bug of ours.
"""

from math import inf

__all__ = ["AutoDDLError", "CaptureError", "Infeasible", "InputError", "MachineError", "MismatchError", "PeerError"]


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
    """No plan fits, or none was found that does: `is_proved` tells them apart. All in bytes per device.

        needed       no plan takes less; infinite where every choice is forbidden
        budget       what there is
        detail       what would help
        reachable    the least peak of a plan that is known; infinite where none is
    """

    def __init__(self, needed: float, budget: float, detail: str = "", reachable: float = inf) -> None:
        self.needed, self.budget, self.detail, self.reachable = needed, budget, detail, reachable
        facts = [f"with the options asked for, no plan takes less than {_bytes(needed)} per device" if needed < inf
                 else "no combination is allowed"] if needed else []
        facts += [f"the smallest that is known takes {_bytes(reachable)}"] if reachable < inf else []
        facts += [f"the budget is {_bytes(budget)}" if budget < inf else "there is no budget"]
        said = "no plan fits" if self.is_proved else "no plan was found, though it is not proved that none fits"
        hint = detail or "use more devices, a smaller batch, more microbatches, or a larger budget"
        super().__init__(f"{said}: {', '.join(facts)}; {hint}")

    @property
    def is_proved(self) -> bool:
        """Whether it is proved that no plan fits."""
        return self.needed > self.budget

    def __reduce__(self) -> tuple[type["Infeasible"], tuple[float, float, str, float]]:
        return type(self), (self.needed, self.budget, self.detail, self.reachable)


class MachineError(AutoDDLError):
    """A process, a link or a collective failed while running."""


class PeerError(MachineError):
    """Another process or a link failed, as this process sees it: a consequence, not the cause."""
