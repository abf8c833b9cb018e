"""Counts the kernels of a mixture of experts on one rank: what each line of `kernels.experts` reads and writes.

Rows are sorted by expert, one for each token and chosen expert. Bytes are for each value of the rows:

    x, w        bytes of a value of a token, and of a weight
    p, s        of a row times its share, and of a sum, which is in float32 where w is half precision
    forward     tokens' rows 2 x, cast to w; product; a kernel for each call of the gate (`gate_passes`); product;
                times the share w + p; added up s a row and 2 s a token, from zero, and cast to x
    backward    q as tokens' rows; z = product; the gate again; z . a 4 w; q times the share 2 w; z times the share
                2 w; the gate's kernels; its halves joined 2 w; tokens' rows again; x' added up as y is
    weights     gradients are filled with zeros, and each is one product for every expert
    biases      looked up by expert 2 w and added 3 w; backward reads q 5 w, and sums q and u' once more

Kernels of whole numbers, of which there is one a row, are left out.
"""

from collections.abc import Sequence

from autoddl.core.graph import Graph, Op
from autoddl.operators.expert_sizes import ExpertSizes, expert_sizes
from autoddl.operators.gate_expressions import gate_passes
from autoddl.operators.kernel_work import KernelWork

__all__ = ["experts_work"]

Kernels = list[KernelWork]


def experts_work(op: Op, graph: Graph, inputs: Sequence[tuple[int, ...]], needs: Sequence[int], sent: bool
                 ) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    """Returns the kernels of a mixture, forward and backward, on pieces of shapes `inputs`.

    `needs` are the places of the inputs that get a gradient; without any there is no backward. Rows are `sent` to the
    ranks of their experts, or those of the experts here are taken."""
    made = _Kernels(op, graph, inputs, sent)
    return tuple(made.forward()), tuple(made.backward(needs)) if needs else ()


class _Kernels:
    """The kernels of one op on pieces of some shapes."""

    def __init__(self, op: Op, graph: Graph, inputs: Sequence[tuple[int, ...]], sent: bool) -> None:
        x, share, w = (graph.tensors[op.inputs[k]].itemsize for k in (0, 2, 3))
        self.s: ExpertSizes = expert_sizes(op, inputs, sent)
        self.x, self.w, self.p = x, w, max(w, share)
        self.sum = max(4, self.p)
        self.tokens = inputs[0][0]
        self.gate, self.halves = str(dict(op.args)["gate"]), int(str(dict(op.args)["halves"]))
        self.biased = [op.slot(name) is not None for name in ("up_bias", "down_bias")]

    def forward(self) -> Kernels:
        s = self.s
        return [*self._taken(s.wide), self._product(s.wide, s.upper), *self._biased(s.upper) * self.biased[0],
                self._rows(s.inner, gate_passes(self.gate)[0] * self.w, "exponential"), self._product(s.inner, s.out),
                *self._biased(s.out) * self.biased[1], self._rows(s.out, self.w + self.p, "multiply"),
                *self._added(s.out, self.p)]

    def backward(self, needs: Sequence[int]) -> Kernels:
        s, w = self.s, self.w
        found = [*self._taken(s.out), self._product(s.out, s.inner, " input"),
                 self._rows(s.inner, gate_passes(self.gate)[0] * w, "exponential"),
                 self._rows(s.inner, 3 * w, "multiply"), self._rows(s.inner, w, "reduce"),
                 *[self._rows(s.out, 2 * w, "gather"), self._rows(s.out, 4 * w, "reduce")] * self.biased[1],
                 self._rows(s.out, 2 * w, "multiply")]
        found += self._of_weight(s.inner, s.out) if 4 in needs else []
        found += [self._rows(s.out, w, "reduce")] * self.biased[1] + [self._rows(s.inner, 2 * w, "multiply"),
                  self._rows(s.inner, gate_passes(self.gate)[1] * w, "exponential backward")]
        found += [self._rows(s.upper, 2 * w, "copy")] * (self.halves > 1)
        found += [*self._taken(s.wide), *self._of_weight(s.wide, s.upper)] if 3 in needs else []
        found += [self._rows(s.upper, w, "reduce")] * self.biased[0]
        return [*found, self._product(s.upper, s.wide, " input"), *self._added(s.wide, w)]

    def _rows(self, width: float, nbytes: float, kind: str) -> KernelWork:
        """A kernel that moves so many bytes for each value of all rows."""
        return KernelWork(0.0, self.s.rows * width * nbytes, name=kind)

    def _product(self, k: int, n: int, side: str = "") -> KernelWork:
        """The product of all rows, by expert: from k values of a row to n, or of a weight of k by n its gradient."""
        s, m = self.s, max(1, round(self.s.rows / self.s.experts))
        moved = (s.rows * (k + n) + s.experts * k * n) * self.w
        shape = (s.experts, k, n, m) if side == " weight" else (s.experts, m, n, k)
        return KernelWork(2.0 * s.rows * k * n, moved, "matmul", shape, side == " weight", f"matmul batched{side}")

    def _of_weight(self, k: int, n: int) -> Kernels:
        """The gradient of the weights of all experts."""
        filled = KernelWork(0.0, float(self.s.experts * k * n * self.w), weight=True, name="copy")
        return [filled, self._product(k, n, " weight")]

    def _taken(self, width: int) -> Kernels:
        """The tokens' rows, in the dtype of the weights."""
        cast = [self._rows(width, self.x + self.w, "copy")] * (self.x != self.w)
        return [self._rows(width, 2 * self.x, "gather"), *cast]

    def _biased(self, width: int) -> Kernels:
        """Biases of the rows' experts, and their addition."""
        return [self._rows(width, 2 * self.w, "gather"), self._rows(width, 3 * self.w, "add")]

    def _added(self, width: int, size: int) -> Kernels:
        """The sum of each token's rows, whose values have `size` bytes, in the dtype of the tokens."""
        values = float(self.tokens * width)
        cast = [self._rows(width, size + self.sum, "copy")] * (size != self.sum)
        back = [KernelWork(0.0, values * (self.sum + self.x), name="copy")] * (self.sum != self.x)
        filled = KernelWork(0.0, values * self.sum, name="copy")
        added = KernelWork(0.0, self.s.rows * width * self.sum + 2 * values * self.sum, name="gather")
        return [*cast, filled, added, *back]
