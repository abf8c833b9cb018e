"""Names the recipes of precision in which a module trains.

    recipe        parameters stored and updated in    used in                     gradients summed in
    as-written    the module's own dtypes             those                       those
    float32       float32                             float32                     float32
    bf16          bfloat16                            bfloat16                    bfloat16
    bf16-mixed    float32                             bfloat16, some in float32   float32 (or `reduce`)

In `bf16-mixed` products, convolutions and attention compute in bfloat16; norms, softmax, losses and powers in float32,
as `torch.autocast` decides for CUDA (`capture.autocast`). A recipe is written `bf16-mixed` or
`bf16-mixed,reduce=bfloat16`.
"""

from dataclasses import dataclass

from autoddl.core.errors import InputError
from autoddl.core.names import near_names

__all__ = ["AS_WRITTEN", "RECIPES", "Precision"]

RECIPES = ("as-written", "float32", "bf16-mixed", "bf16")
REDUCED = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Precision:
    """One recipe; `reduce` is the dtype in which `bf16-mixed` sums gradients. Raises InputError for an unknown one."""

    name: str = "as-written"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in RECIPES:
            raise InputError(f"there is no precision {self.name!r}; "
                             + near_names(self.name, RECIPES, f"there are {', '.join(RECIPES)}", most=1))
        if self.reduce not in REDUCED:
            raise InputError(f"gradients are not reduced in {self.reduce!r}; they are in {' or '.join(REDUCED)}")
        if self.reduce != "float32" and not self.is_mixed:
            raise InputError(f"precision {self.name} reduces gradients in the dtype of its parameters; only bf16-mixed "
                             "has a choice: write bf16-mixed,reduce=bfloat16")

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """The recipe that `text` writes. Raises InputError."""
        name, *others = (part.strip() for part in text.split(","))
        if not others:
            return cls(name)
        key, _, value = others[0].partition("=")
        if key != "reduce" or len(others) > 1:
            raise InputError(f"precision {text!r} is not written like 'bf16-mixed' or 'bf16-mixed,reduce=bfloat16'")
        return cls(name, value)

    def __str__(self) -> str:
        return self.name if self.reduce == "float32" else f"{self.name},reduce={self.reduce}"

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are used in another dtype than they are stored in."""
        return self.name == "bf16-mixed"

    @property
    def stored(self) -> str | None:
        """The dtype in which floating parameters, buffers and inputs are given; None for the module's own."""
        return {"float32": "float32", "bf16-mixed": "float32", "bf16": "bfloat16"}.get(self.name)

    @property
    def used(self) -> str | None:
        """The dtype in which products are computed; None for the module's own."""
        return {"float32": "float32", "bf16-mixed": "bfloat16", "bf16": "bfloat16"}.get(self.name)


AS_WRITTEN = Precision()
