"""What the search charges an op besides what its edges charge: what depends on its own choice alone.

    beside    what backward reads that is neither input nor output: masks, indices, statistics, probabilities
    moment    forward   inputs that its backward does not read, parameters, outputs that it does not read, temporaries
              backward  gradients of outputs and inputs, parameters, temporaries; where several readers' gradients add
                        up, the sum and what it is added to

An operand that backward reads is charged as kept, by its edge or its hub, and not again; but for parameters, which may
be gathered for the moment alone. All gradients of parameters are charged to the whole step, from which comes the room
for gradients of activations that wait for others.
"""

from math import prod

from autoddl.footprint import Call, Footprint, Shapes, by_itself
from autoddl.footprints import footprint_of
from autoddl.graph import Graph, Kind, Op
from autoddl.heap import Value, contiguous
from autoddl.work import VIEWS, base, keeps_input, keeps_output

__all__ = ["charges"]


def charges(op: Op, graph: Graph, inputs: Shapes, outputs: Shapes, inner: bool, differentiable: frozenset[int],
            shared: frozenset[int], processor: bool = False) -> tuple[float, float]:
    """(beside, moment) in bytes, on local pieces of shapes `inputs` and `outputs`. `shared` are the hubs' outputs;
    `processor`: it runs on one."""
    tensors = graph.tensors
    reads = tuple([Value(-1, shape, contiguous(shape), tensors[t].itemsize)
                   for shape, t in zip(inputs, op.inputs, strict=True)])
    flows = any(t in differentiable for t in op.outputs)
    needs = tuple([k for k, t in enumerate(op.inputs) if t in differentiable]) if flows else ()
    wide = tuple([tensors[t].itemsize for t in op.outputs])
    call = Call(op, reads, outputs, wide, needs, by_itself(op, graph, inputs, inner), processor)
    made = footprint_of(call) if base(op) not in VIEWS else Footprint()
    written = [float(prod(shape) * size) for shape, size in zip(outputs, wide, strict=True)]
    whole = sum(x.nbytes for x, t in zip(reads, op.inputs, strict=True) if tensors[t].kind is Kind.PARAMETER)
    read = sum(x.nbytes for k, x in enumerate(reads) if tensors[op.inputs[k]].kind is not Kind.PARAMETER
               and not (flows and keeps_input(op, k, graph, differentiable)))
    kept = keeps_output(op, differentiable)
    forward = read + whole + max(made.before, made.during + sum(written) - written[0] * kept)
    beside = _beside(op, call, made, differentiable) + made.slack
    if not needs:
        return beside, forward
    yields = sum(max(reads[k].nbytes, written[0] if made.wide else 0.0) + reads[k].nbytes * (op.inputs[k] in shared)
                 for k in needs)
    given = sum(n for n, t in zip(written, op.outputs, strict=True) if t in differentiable)
    return beside, max(forward, given + yields + whole + max(made.back, made.late))


def _beside(op: Op, call: Call, made: Footprint, differentiable: frozenset[int]) -> float:
    """What is kept beside; the loss keeps logarithms in the place of the logits, which their edge charges."""
    if not call.needs:
        return 0.0
    extra = made.beside
    if base(op) == "autoddl.token_loss" and 0 not in made.saves:
        extra -= call.inputs[0].nbytes
    outputs = sum(prod(call.outputs[k]) * call.wide[k] for k in made.keeps if k)
    return max(0.0, extra) + outputs
