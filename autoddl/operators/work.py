"""Counts the kernels of an op, forward and backward: their flops and bytes, and what is kept for backward.

    flops   matmul family   2 * batch * m * n * k                                       (multiply and add)
            einsum          the same, by where a letter stands: batch in both factors and the output, m and n in one
                            factor and the output, k in both factors alone; of more than two, all sizes multiplied
            attention       2 * batch * heads * queries * keys * (a + b): widths of keys and values (`attention_work`)
            convolution     2 * elements of the output * input channels / groups * kernel elements
            transposed      2 * elements of the input * output channels / groups * kernel elements
            experts         those of both products, on the rows of `expert_sizes` (`expert_work`)
            recurrent       those of its products, most of which run in every step (`recurrent_work`)
            bilinear        2 * rows * elements of the matrices
            own             what a rule of the user's own says, backward twice as many (`own_facts`)
            complex         4 times these, twice where a factor is real
            others          none: they are bound by the bytes they move, a Fourier transform too
    bytes   every tensor of the kernel once
    backward of C = A B  (m, k) (k, n): A' = C' B^T is (m, n, k), a product along n; B' = A^T C' is (k, m, n), along m;
                 of a convolution the same; of attention one kernel (`attention_work`)
             of others: one kernel reads the outputs' gradients and what was kept, and writes the inputs' gradients

A view moves nothing and launches nothing, but the gradient of what was cut is put together. What an op keeps follows
from its derivative: a product keeps its factors, a sum nothing, relu and softmax their output.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from autoddl.core.graph import Graph, Kind, Op
from autoddl.operators.attention_work import attention_backward, attention_work, ring_work, written_attention
from autoddl.operators.expert_work import experts_work
from autoddl.operators.families import FACTORS, family_of, flagged, reading
from autoddl.operators.kernel_kinds import kind_of
from autoddl.operators.kernel_work import KernelWork
from autoddl.operators.own_facts import own_flops, own_saves
from autoddl.operators.recurrent_work import is_recurrent, recurrent_work
from autoddl.operators.windows import is_transposed, padded_shape, windows_of

__all__ = ["VIEWS", "KernelWork", "base", "intermediates", "is_product", "keeps_input", "keeps_output",
           "kept_mask_bytes", "letters", "read_back", "weight_kernels", "work"]

Shapes = tuple[tuple[int, ...], ...]

VIEWS = flagged("view")
_CUTS, _CONVOLUTIONS, _ATTENTION = flagged("cut"), flagged("convolution"), reading("all")
_FREE = flagged("free")

BLOCK = 2048
"""Elements in a row that are copied as a block, where rows are looked up: as a factor half way between the rows of 256
and of 16384 that `measure` times."""


def base(op: Op) -> str:
    """`aten.add.Tensor` -> `aten.add`."""
    return _base(op.target)


@lru_cache(maxsize=10_000)
def _base(target: str) -> str:
    return ".".join(target.split(".")[:2])


def _factors(op: Op) -> tuple[str, ...]:
    """Slots of the factors of a product; the gradient of one reads the others."""
    name = base(op)
    return FACTORS.get(name, op.slots if family_of(name).reads == "factors" else ())


def intermediates(graph: Graph) -> frozenset[int]:
    """The tensors that ops compute: not inputs, parameters and buffers, nor hubs and views of these.

    Their storage is freed after the last reader, so a slice of one is a copy.
    """
    found = set[int]()
    for op in graph.ops:
        if base(op) not in VIEWS or found.intersection(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def is_product(op: Op) -> bool:
    """Whether the op is a product or a convolution, whose backward has a kernel for each factor."""
    name = base(op)
    return name in _CONVOLUTIONS or name in FACTORS or name == "aten.einsum"


def keeps_input(op: Op, k: int, graph: Graph, differentiable: frozenset[int]) -> bool:
    """Whether backward of `op` reads the value of input `k`, or needs its shape."""
    needs = {i for i, t in enumerate(op.inputs) if t in differentiable}
    if not needs or differentiable.isdisjoint(op.outputs) or op.slots[k] == "bias":
        return False
    if (own := own_saves(op)) is not None:
        return k in own.inputs
    match family_of(base(op)).reads:
        case "nothing" | "output" | "mask":
            return False
        case "weight":
            return op.target != "aten.lerp.Scalar"
        case "shape":  # of one value a channel adaptive pooling is a mean
            return not (base(op) == "aten.adaptive_avg_pool2d" and prod(graph.tensors[op.outputs[0]].shape[-2:]) == 1)
        case "indices":
            return not graph.tensors[op.inputs[k]].is_floating
        case "matrices":
            return len(graph.tensors[op.inputs[k]].shape) > 1
        case "place":
            return len(op.outputs) == 1
        case "source":
            return op.slots[k] != "self"
        case "divisor":
            return len(op.inputs) > 1 and (k == 1 or 1 in needs)
        case "factors":
            factors = _factors(op)
            return op.slots[k] in factors and any(op.slots[i] in factors for i in needs - {k})
    return True


def read_back(t: int, graph: Graph, uses: Mapping[int, tuple[tuple[int, int], ...]], differentiable: frozenset[int],
              again: frozenset[str] = frozenset(), moved: frozenset[tuple[str, str]] = frozenset()) -> bool:
    """Whether the backward of some op reads tensor t, itself or behind hubs and views, which keep nothing of their own.

    `uses` are the graph's consumers. The ops of the names `again` are computed again in backward. Behind a hub or view,
    the reads `moved` (op, slot) are of another tensor, which a conversion makes.
    """
    return any(_reads_back(i, k, graph, uses, differentiable, again, moved) for i, k in uses[t])


def _reads_back(i: int, k: int, graph: Graph, uses: Mapping[int, tuple[tuple[int, int], ...]],
                differentiable: frozenset[int], again: frozenset[str], moved: frozenset[tuple[str, str]]) -> bool:
    """Whether the backward of op i, or of one behind it if it is a view, reads what it reads in slot k."""
    op = graph.ops[i]
    if op.name in again:
        return True
    if base(op) not in VIEWS:
        return keeps_input(op, k, graph, differentiable)
    return any(_reads_back(j, n, graph, uses, differentiable, again, moved) for out in op.outputs for j, n in uses[out]
               if graph.ops[j].name in again or (graph.ops[j].name, graph.ops[j].slots[n]) not in moved)


def keeps_output(op: Op, differentiable: frozenset[int]) -> bool:
    """Whether backward of `op` reads its own output."""
    if (own := own_saves(op)) is not None:
        return bool(own.outputs) and any(t in differentiable for t in op.outputs)
    return family_of(base(op)).reads in ("output", "all") and any(t in differentiable for t in op.outputs)


def kept_mask_bytes(op: Op, outputs: Shapes, differentiable: frozenset[int]) -> float:
    """Bytes kept that are neither an input nor an output: a dropout's mask, one byte an element."""
    return float(prod(outputs[0])) if family_of(base(op)).reads == "mask" and op.outputs[0] in differentiable else 0.0


def _product(name: str, op: Op, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """(batch, m, n, k) of a product or convolution, empty of what is neither: an einsum that sums nothing multiplies
    elementwise. Rows that meet one matrix are one m."""
    out = outputs[0]
    if name == "aten.einsum":
        dims = _einsum(str(op.arg("equation")), inputs)
        return dims if len(inputs) > 1 and dims[3] > 1 else ()
    if name in _CONVOLUTIONS:
        x, weight = inputs[:2]
        if "transpose" in name or dict(op.args).get("transposed"):
            return 1, prod(x) // max(1, weight[0]), prod(weight[1:]), weight[0]
        return 1, out[0] * prod(out[2:]), out[1], prod(weight[1:])
    if name == "autoddl.grouped_mm":
        groups, k, n = inputs[1]
        return groups, max(1, out[0] // (int(str(op.arg("count"))) or groups)), n, k
    if name not in FACTORS:
        return ()
    first, second = (inputs[slot if (slot := op.slot(which)) is not None else i]
                     for i, which in enumerate(FACTORS[name]))
    k = first[-1] if first else 1
    if name == "aten.linear" or len(second) <= 2:
        n = out[-1] if len(second) == 2 and out else 1
        return 1, prod(out) // max(1, n), n, k
    n = out[-1]
    m = out[-2] if len(first) > 1 else 1
    return prod(out) // max(1, m * n), m, n, k


def letters(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Returns the letters that an einsum gives the dims of each factor, and of its output.

    Dims under `...` are called by number, counted from the last."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    dims = [_named(word, rank) for word, rank in zip(left.split(","), ranks, strict=True)]
    if not arrow:
        right = "..." + "".join(sorted(a for a in left if left.count(a) == 1 and a.isalpha()))
    hidden = max(sum(a.isdigit() for a in names) for names in dims)
    return dims, _named(right, len(right.replace("...", "")) + hidden)


def _named(word: str, rank: int) -> list[str]:
    before, dots, after = word.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(str(i) for i in reversed(range(hidden))), *after]


def _einsum(equation: str, shapes: Shapes) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of the first factor and the others. With two factors, a dim that only one of them has and the
    output lacks is summed before the product."""
    dims, written = letters(equation, [len(shape) for shape in shapes])
    size: dict[str, int] = {}
    for names, shape in zip(dims, shapes, strict=True):
        for name, s in zip(names, shape, strict=True):
            size[name] = max(s, size.get(name, 1))
    first, rest, out = set(dims[0]), set[str]().union(*dims[1:]), set(written)
    summed = (first & rest if len(dims) == 2 else first | rest) - out
    batch, m, n, k = (prod(size[a] for a in part) for part in (first & rest & out, (first & out) - rest,
                                                               (rest & out) - first, summed))
    return batch, m, n, k


def _nbytes(graph: Graph, tensors: tuple[int, ...], shapes: Shapes) -> list[float]:
    """Bytes of the pieces of each tensor."""
    return [float(prod(shape) * graph.tensors[t].itemsize) for t, shape in zip(tensors, shapes, strict=True)]


def _together(op: Op, name: str, shape: tuple[int, ...]) -> int:
    """How many elements of a tensor of `shape` stand together where it is read by indices."""
    dims = [int(slot.split(".")[1]) for slot in op.slots if slot.startswith("indices.")]
    if name == "aten.gather" or dims != [*range(len(dims))] or dict(op.args).get("dim", 0) != 0:
        return 1
    return prod(shape[len(dims) or 1:])


def _real_products(op: Op, graph: Graph) -> int:
    """Products of real numbers in one of the op's: 4 of two complex numbers, 2 where a factor is real."""
    parts = [graph.tensors[t].dtype.startswith("complex") for t in op.inputs]
    return 4 if all(parts) and parts else 2 if any(parts) else 1


def work(op: Op, graph: Graph, inputs: Shapes, outputs: Shapes, differentiable: frozenset[int], inner: bool = False
         ) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    """Returns the kernels of `op`, forward and backward, on shards of shapes `inputs` and `outputs`.

    `differentiable` are the positions of the tensors that receive a gradient; `inner` says that the kernel communicates
    by itself."""
    name, read = base(op), _nbytes(graph, op.inputs, inputs)
    if name in _FREE:
        return (), ()
    first, *others = _nbytes(graph, op.outputs, outputs)
    written = first + sum(others)
    if name in VIEWS:
        cut = name in _CUTS and op.inputs[0] in differentiable and any(t in differentiable for t in op.outputs)
        return (), (KernelWork(0.0, read[0] + written, name="copy backward"),) if cut else ()
    moved = sum(read) + written
    needs = [k for k, t in enumerate(op.inputs) if t in differentiable]
    flows = bool(needs) and any(t in differentiable for t in op.outputs)
    beside = kept_mask_bytes(op, outputs, differentiable)
    if name == "autoddl.experts":
        return experts_work(op, graph, inputs, needs if flows else [], inner)
    if is_recurrent(name):
        return recurrent_work(op, graph, inputs, flows)
    if inner and name in _ATTENTION:
        return ring_work(op, graph, inputs, flows)
    if name in _ATTENTION and flows and op.slot("attn_mask") in needs:
        return written_attention(op, graph, inputs)
    if inner and (windows := windows_of(op, tuple(graph.tensors[t].shape for t in op.inputs))):
        forward_, backward_ = work(op, graph, inputs, outputs, differentiable)
        size = graph.tensors[op.inputs[0]].itemsize
        elements = prod(padded_shape(inputs[0], outputs[0], windows)) + prod(outputs[0]) * is_transposed(op)
        copied = KernelWork(0.0, 2.0 * size * elements, name="copy")
        return (*forward_, copied), (*backward_, copied) if 0 in needs and flows else backward_
    if dims := _product(name, op, inputs, outputs):
        kind = "convolution" if name in _CONVOLUTIONS else "matmul"
        flops = 2.0 * _real_products(op, graph) * prod(dims)
        forward = KernelWork(flops, moved, kind, dims, name=f"{kind} batched" if dims[0] > 1 else kind)
        return (forward,), _transposed(op, graph, read, first, forward, needs) if flows else ()
    forward = _forward(op, graph, inputs, outputs, read, written, beside)
    if not flows:
        return (forward,), ()
    kept = sum(nbytes for k, nbytes in enumerate(read)
               if family_of(name).reads != "shape" and keeps_input(op, k, graph, differentiable)) + beside
    if keeps_output(op, differentiable) and name not in _ATTENTION:
        kept += written
    nbytes = written + kept + sum(read[k] for k in needs)
    if name in _ATTENTION:
        return (forward,), (attention_backward(forward, inputs, nbytes),)
    if forward.kind == "matmul":
        return (forward,), (_as_product(2 * forward.flops, nbytes, outputs[0]),)
    after = forward.name if forward.name == "add" else f"{forward.name} backward"  # gradients that add up elsewhere
    return (forward,), (KernelWork(0.0, nbytes, name=after),)


def _forward(op: Op, graph: Graph, inputs: Shapes, outputs: Shapes, read: Sequence[float], written: float, beside: float
             ) -> KernelWork:
    """The kernel of an op that is no product of two factors, of bytes that it reads, writes, and keeps in a mask."""
    name, moved = base(op), sum(read) + written
    if name in ("aten.embedding", "aten.index", "aten.gather", "aten.index_select"):
        blocks = " blocks" if _together(op, name, inputs[0]) >= BLOCK else ""
        return KernelWork(0.0, 2 * written, name=f"{kind_of(name)}{blocks}")
    if name == "autoddl.embedding_bag":
        rows = float(prod(inputs[1]) * inputs[0][1] * graph.tensors[op.inputs[0]].itemsize)
        return KernelWork(0.0, rows + sum(read[1:]) + written, name=kind_of(name))
    if name == "autoddl.token_loss":  # the logarithms of the probabilities are written
        return KernelWork(0.0, moved + read[0], name=kind_of(name))
    if name in _ATTENTION:
        return attention_work(op, graph, inputs, moved)
    if flops := _bilinear(op, name, inputs) or own_flops(op, graph, (*inputs, *outputs)):
        return _as_product(_real_products(op, graph) * flops, moved, outputs[0])
    return KernelWork(0.0, moved + beside, name=kind_of(name))


def _bilinear(op: Op, name: str, inputs: Shapes) -> float:
    """Flops of a bilinear form, whose every row meets every element of its matrices; else 0."""
    if name != "aten.bilinear":
        return 0.0
    met = [prod(shape) for slot, shape in zip(op.slots, inputs, strict=True)
           if len(shape) > 1 and not slot.startswith("input")]
    return 2.0 * prod(inputs[0][:-1]) * sum(met)


def _as_product(flops: float, nbytes: float, output: tuple[int, ...]) -> KernelWork:
    """The kernel of an op that counts its flops: one product that writes the output, as long as its flops make it."""
    n = output[-1] if output else 1
    m = max(1, prod(output) // max(1, n))
    return KernelWork(flops, nbytes, "matmul", (1, m, n, max(1, round(flops / (2 * m * max(1, n))))), name="matmul")


def weight_kernels(op: Op, differentiable: frozenset[int], weights: frozenset[int], count: int) -> tuple[bool, ...]:
    """For each of the `count` backward kernels of `op`, whether it waits for W where backward is split.

    `weights` are the tensors that depend on parameters alone (`core.split_backward`). A product has a kernel for each
    input with a gradient. Any other op computes all at once, in W if nothing but weights have a gradient.
    """
    late = [t in weights for t in op.inputs if t in differentiable]
    if late and all(late):
        return (True,) * count
    return tuple(late) if is_product(op) and count == len(late) else (False,) * count


def _transposed(op: Op, graph: Graph, read: list[float], size: float, forward: KernelWork, needs: list[int]
                ) -> tuple[KernelWork, ...]:
    """A' along n, B' along m; a bias or an addend sums the outputs' gradients. `read` are the inputs' bytes, `size` the
    output's."""
    batch, m, n, k = forward.shape
    factors = [op.slot(which) for which in _factors(op)] or [0, 1]
    multiplied = sum(read[factor] for factor in factors if factor is not None)
    found = []
    for need in needs:
        if need not in factors:
            found.append(KernelWork(0.0, size + read[need], weight=True, name="reduce"))
            continue
        first = need == factors[0]
        weight = graph.tensors[op.inputs[need]].kind is Kind.PARAMETER or op.slots[need] == "weight"
        side = f"{forward.name} {'input' if first else 'weight'}"
        found.append(KernelWork(forward.flops, size + multiplied, forward.kind,
                          (batch, m, k, n) if first else (batch, k, n, m), weight, side))
    return tuple(found)
