"""Divides a plan's seconds and bytes among the blocks of the model.

Every factor of the problem belongs to one op or parameter; an edge belongs to the op that reads. A *block* is the
module path up to one part behind its first number, with the numbers folded: `layers.0-31.attn`. The block `(common)`
has the part of the problem that no choice changes.

    seconds of a block = compute of its ops + update of its parameters + conversions (all else that its factors cost)
    bytes of a block   = those of its factors at the moment at which the plan is largest (its row)
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.core.graph import Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.names import fold_names
from autoddl.planner.question import Rebuilt
from autoddl.pricing.kernel_prices import op_seconds
from autoddl.pricing.price import update_seconds

__all__ = ["COMMON", "BlockCost", "block_costs", "block_of", "row_text"]

COMMON = "(common)"


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds of one block in a step, and its bytes on a rank at the moment of the plan's row."""

    block: str
    compute: float
    conversions: float
    nbytes: float

    @property
    def seconds(self) -> float:
        """Seconds of the block in a step, conversions included."""
        return self.compute + self.conversions


def block_of(item: Op | Tensor) -> str:
    """The module that `item` belongs to, cut one part behind the first number."""
    path = item.module if isinstance(item, Op) else item.fqn.rpartition(".")[0] or item.fqn
    parts = path.split(".") if path else ["(top)"]
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:number + 2])


def block_costs(made: Rebuilt) -> tuple[BlockCost, ...]:
    """All blocks, the most expensive first; they add up to the plan's seconds and its row's bytes."""
    graph, (problem, choice) = made.pricing.graph, made.with_bytes()
    differentiable = graph.differentiable()
    blocks = [block_of(v.item) for v in made.variables]
    compute: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    nbytes: dict[str, float] = defaultdict(float)
    for v, (variable, k) in enumerate(zip(made.variables, made.choice, strict=True)):
        if isinstance(variable.item, Op) and variable.item.target != HUB:
            once = op_seconds(made.pricing, variable.item, variable.choices[k], differentiable)
            compute[blocks[v]] += once * made.pricing.microbatches
        elif isinstance(variable.item, Tensor):
            compute[blocks[v]] += update_seconds(made.pricing, variable.item, variable.choices[k].outputs[0])
    for factor, (table, cell) in zip(problem.factors, problem.cells(choice), strict=True):
        cost, held, _ = table.at(cell)
        seconds[blocks[factor.variables[-1]]] += cost
        nbytes[blocks[factor.variables[-1]]] += held
    found = [BlockCost(COMMON, problem.fixed_seconds, 0.0, problem.fixed_bytes)]
    for name, members in fold_names(seconds).items():
        mine = sum(compute[b] for b in members)
        other = max(0.0, sum(seconds[b] for b in members) - mine)
        found.append(BlockCost(name, mine, other, sum(nbytes[b] for b in members)))
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.block)))


def row_text(row: Mapping[str, float]) -> str:
    """The moments of a row as text: `backward blocks_3_up`, or `60 % around add_7 and 40 % update`."""
    if len(row) == 1:
        return next(iter(row))
    return " and ".join(f"{weight:.0%} {moment}".replace("%", " %", 1) for moment, weight in row.items())
