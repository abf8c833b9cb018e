"""What the search charges an op besides what its edges charge: what depends on its own choice alone.

    beside    what backward reads that is neither input nor output: masks, indices, statistics, probabilities
    moment    forward   inputs that its backward does not read, parameters, outputs that it does not read, temporaries
              backward  gradients of outputs and inputs, parameters, temporaries; where several readers' gradients add
                        up, the sum and what it is added to

An operand that backward reads is charged as kept, by its edge or its hub, and not again; but for parameters, which may
be gathered for the moment alone. All gradients of parameters are charged to the whole step, from which comes the room
for gradients of activations that wait for others.
"""

from dataclasses import dataclass
from math import prod

from autoddl.core.graph import Graph, Kind, Op
from autoddl.operators.footprints.footprint import Call, Footprint, Shapes, by_itself
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.work import VIEWS, base, keeps_input, keeps_output

__all__ = ["Charges"]


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """What holds of an op whatever its pieces are. Inputs: `needs` get a gradient, `shared` are behind hubs, where that
    is added to others, `whole` are parameters, `read` are there for the moment alone; `sizes` are their itemsizes.
    Outputs: `given` have a gradient, `wide` are their itemsizes, `kept` says whether backward reads them."""

    op: Op
    graph: Graph
    processor: bool
    needs: tuple[int, ...]
    shared: frozenset[int]
    whole: tuple[int, ...]
    read: tuple[int, ...]
    sizes: tuple[int, ...]
    given: tuple[int, ...]
    wide: tuple[int, ...]
    kept: bool

    @classmethod
    def of(cls, op: Op, graph: Graph, differentiable: frozenset[int], hubs: frozenset[int], processor: bool = False
           ) -> "Charges":
        """`hubs` are the tensors that hubs write; `processor`: it runs on one."""
        tensors, inputs = graph.tensors, tuple(enumerate(op.inputs))
        given = tuple(k for k, t in enumerate(op.outputs) if t in differentiable)
        whole = tuple(k for k, t in inputs if tensors[t].kind is Kind.PARAMETER)
        return cls(op, graph, processor,
                   tuple(k for k, t in inputs if t in differentiable) if given else (),
                   frozenset(k for k, t in inputs if t in hubs), whole,
                   tuple(k for k, _ in inputs if k not in whole
                         and not (given and keeps_input(op, k, graph, differentiable))),
                   tuple(tensors[t].itemsize for t in op.inputs), given,
                   tuple(tensors[t].itemsize for t in op.outputs), keeps_output(op, differentiable))

    def of_pieces(self, inputs: Shapes, outputs: Shapes, inner: bool) -> tuple[float, float]:
        """(beside, moment) in bytes, on local pieces of these shapes; `inner`: the kernel reduces by itself."""
        reads = tuple([Value(-1, shape, contiguous(shape), size)
                       for shape, size in zip(inputs, self.sizes, strict=True)])
        call = Call(self.op, reads, outputs, self.wide, self.needs, by_itself(self.op, self.graph, inputs, inner),
                    self.processor)
        made = footprint_of(call) if base(self.op) not in VIEWS else Footprint()
        nbytes = [x.nbytes for x in reads]
        written = [float(prod(shape) * size) for shape, size in zip(outputs, self.wide, strict=True)]
        whole, read = (sum([nbytes[k] for k in which]) for which in (self.whole, self.read))
        forward = read + whole + max(made.before, made.during + sum(written) - written[0] * self.kept)
        beside = _beside(call, made) + made.slack
        if not self.needs:
            return beside, forward
        yields = sum([max(nbytes[k], written[0] if made.wide else 0.0) + nbytes[k] * (k in self.shared)
                      for k in self.needs])
        given = sum([written[k] for k in self.given])
        return beside, max(forward, given + yields + whole + max(made.back, made.late))


def _beside(call: Call, made: Footprint) -> float:
    """What is kept beside; the loss keeps logarithms in the place of the logits, which their edge charges."""
    if not call.needs:
        return 0.0
    extra = made.beside
    if base(call.op) == "autoddl.token_loss" and 0 not in made.saves:
        extra -= call.inputs[0].nbytes
    outputs = sum(prod(call.outputs[k]) * call.wide[k] for k in made.keeps if k)
    return max(0.0, extra) + outputs
