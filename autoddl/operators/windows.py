"""Says where convolutions, pools and interpolations look, and what ranks send each other where images are split.

Output o along a dim looks at `reach` places, of which the first may lie in the padding. Every `parts`-th is an input:

    o stride - before, ..., o stride - before + reach - 1

    convolution, pool     reach = dilation (kernel - 1) + 1                                          parts = 1
    transposed            the same, stride = 1, before = reach - 1 - padding                         parts = its stride
    linear, p/q times     output o is made of the inputs beside ((2 o + 1) q - p) / (2 p):
                          stride = 2 q, before = 3 p - q - 1, reach = 4 p                            parts = 2 p
    aligned, n to m       of those beside o (n - 1) / (m - 1):
                          stride = n - 1, before = m - 2, reach = 2 m - 2                            parts = m - 1
    cubic                 of two on either side: before one part more, reach two parts more
    roll by s             stride = 1, before = s, reach = 1, and the ends of the dim meet              around = its size

The ranks of a group have consecutive pieces of the input and of the output. A rank with the outputs [a, b) reads

    need = [ceil((a stride - before) / parts), floor(((b - 1) stride - before + reach - 1) / parts)]

What lies in another's piece is sent by that rank: the *halo* of the piece. Along each dim a rank has `own`, and what it
sends of it to all ranks is the sum of |own ∩ need| over their needs. Boxes over several dims are products:

    elements sent = others * (product of these sums - product of |own ∩ own need|)

In backward the gradients of what came go back, and are added up. A dim is *aligned* where no rank needs anything:
stride >= reach, nothing is padded, and the pieces of input and output lie above each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product

from autoddl.core.graph import Op, Value
from autoddl.core.layout import Axis, B, Extent, Layout, Mesh, Split, extents

__all__ = ["HALO", "INTERPOLATED", "PLACE", "ROLL", "TRANSPOSED", "WINDOWED", "Box", "Shape", "Window", "common",
           "halo_box", "halo_elements", "is_aligned", "is_transposed", "is_whole", "padded_shape", "place_name",
           "read_box", "wanted", "windows_of"]

HALO = "halo"
"""The kind of a message in which each rank of a group sends what its neighbours need."""
PLACE = "place"
"""What the names of dims of an image or a sequence begin with, in rules that may split them."""
_CONVOLUTIONS = frozenset(f"aten.conv{k}d.{form}" for k in (1, 2, 3) for form in ("default", "padding"))
_POOLS = frozenset(f"aten.{kind}_pool{k}d.default" for k in (1, 2, 3) for kind in ("max", "avg"))
TRANSPOSED = frozenset(f"aten.conv_transpose{end}" for end in ("1d.default", "2d.input", "3d.input"))
"""Targets of convolutions that look the other way."""
_CUBIC = "aten.upsample_bicubic2d.vec"
INTERPOLATED = frozenset((_CUBIC, *(f"aten.upsample_{kind}d.vec" for kind in ("linear1", "bilinear2", "trilinear3"))))
"""Targets of linear and cubic interpolations."""
ROLL = "aten.roll.default"
"""The target that moves an image along itself, round its ends."""
WINDOWED = frozenset((*_CONVOLUTIONS, *_POOLS, *TRANSPOSED, *INTERPOLATED, ROLL, "aten.convolution.default"))
"""Targets of ops that look through windows."""
_SIMPLE = 10**6
"""The largest denominator of a factor."""
Shape = tuple[int, ...]
Box = tuple[Extent, ...]
"""(first, count) along each dim."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where an output looks along one dim; all are numbers of elements."""

    stride: int
    reach: int
    before: int
    parts: int = 1
    around: int = 0
    """The size of a dim whose ends meet; 0 where they do not."""

    def first(self, out: int) -> int:
        """The first input at which an output looks; below 0 in the padding."""
        return -((self.before - out * self.stride) // self.parts)

    def last(self, out: int) -> int:
        """The last input at which an output looks."""
        return (out * self.stride - self.before + self.reach - 1) // self.parts


def place_name(dim: int) -> str:
    """The name, in a rule, of a dim of an image that may be split."""
    return f"{PLACE}{dim}"


def is_transposed(op: Op) -> bool:
    """Whether an op is a convolution that looks the other way."""
    return op.target in TRANSPOSED or bool(dict(op.args).get("transposed"))


def windows_of(op: Op, shapes: tuple[Shape, ...]) -> dict[int, Window]:
    """By dim of the input, the windows of an op on inputs of `shapes`; empty for an op that has none.

    There are none for averages that count the padding in some windows alone, nor for transposed convolutions with gaps
    between windows.
    """
    args = dict(op.args)
    if op.target not in WINDOWED:
        return {}
    if op.target in INTERPOLATED:
        return _interpolated(op, shapes[0])
    if op.target == ROLL:
        return _rolled(op, shapes[0])
    if is_transposed(op):
        return _transposed(op, shapes)
    pools = op.target in _POOLS
    kernel = _each(args["kernel_size"], None) if pools else shapes[1][2:]
    count = int(op.target.split("d.")[0][-1]) if op.target != "aten.convolution.default" else len(kernel)
    sizes = _spread(kernel, count)
    stride = _spread(_each(args.get("stride"), None) or (sizes if pools else (1,)), count)
    dilation = _spread(_each(args.get("dilation"), 1), count)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, sizes, strict=True)]
    padding = args.get("padding", 0)
    before = [(r - 1) // 2 for r in reach] if padding == "same" else [0] * count if padding == "valid" else _spread(
        _each(padding, 0), count)
    counted = args.get("count_include_pad", True) or not any(before)
    if op.target.startswith("aten.avg") and (args.get("ceil_mode") or not counted):
        return {}
    first = len(shapes[0]) - count
    return {first + i: Window(*row) for i, row in enumerate(zip(stride, reach, before, strict=True))}


def _transposed(op: Op, shapes: tuple[Shape, ...]) -> dict[int, Window]:
    """The windows of a transposed convolution, without gaps between them."""
    args, kernel = dict(op.args), shapes[1][2:]
    stride, dilation, padding = (_spread(_each(args.get(name), default), len(kernel))
                                 for name, default in (("stride", 1), ("dilation", 1), ("padding", 0)))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if any(r < s for r, s in zip(reach, stride, strict=True)):
        return {}
    first = len(shapes[0]) - len(kernel)
    return {first + i: Window(1, r, r - 1 - p, s)
            for i, (s, r, p) in enumerate(zip(stride, reach, padding, strict=True))}


def _interpolated(op: Op, shape: Shape) -> dict[int, Window]:
    """The windows of an interpolation to a size, or by factors, which are taken for the nearest simple fractions."""
    args = dict(op.args)
    sizes, given = _each(args.get("output_size"), None), args.get("scale_factors")
    factors = [str(f) for f in given] if isinstance(given, tuple) else []
    by = [Fraction(f).limit_denominator(_SIMPLE) for f in factors]
    first = len(shape) - len(sizes or by)
    made = sizes or [int(n * float(f)) for n, f in zip(shape[first:], factors, strict=True)]  # as PyTorch rounds
    if not made or min(made) < 1 or (args.get("align_corners") and min(made) < 2):
        return {}
    if args.get("align_corners"):
        found = [Window(n - 1, 2 * m - 2, m - 2, m - 1) for n, m in zip(shape[first:], made, strict=True)]
    else:
        each = [Fraction(m, n) for n, m in zip(shape[first:], made, strict=True)] if sizes else by
        found = [Window(2 * q, 4 * p, 3 * p - q - 1, 2 * p) for p, q in (f.as_integer_ratio() for f in each)]
    if op.target == _CUBIC:
        found = [Window(w.stride, w.reach + 2 * w.parts, w.before + w.parts, w.parts) for w in found]
    return {first + i: window for i, window in enumerate(found)}


def _rolled(op: Op, shape: Shape) -> dict[int, Window]:
    """The windows of a roll along dims, by fewer places than their sizes."""
    args, moved = dict(op.args), dict[int, int]()
    for dim, shift in zip(_each(args.get("dims"), None), _each(args.get("shifts"), None), strict=False):
        moved[dim % len(shape)] = moved.get(dim % len(shape), 0) + shift
    by = {d: shift % shape[d] for d, shift in moved.items() if shape[d]}
    return {d: Window(1, 1, shift, 1, shape[d]) for d, shift in by.items() if shift}


def is_whole(window: Window, own: Extent) -> bool:
    """Whether a rank has all of a dim whose ends meet: it reads what it has, and moves it itself."""
    return 0 < window.around == own[1]


def is_aligned(window: Window, size: int, out: int) -> bool:
    """Whether the pieces of `out` outputs need nothing but the pieces of `size` inputs above them."""
    if window.parts > 1:
        return window.stride == 1 and window.reach == window.parts == window.before + 1 and out == window.parts * size
    return window.stride >= window.reach and not window.before and size == window.stride * out


def wanted(window: Window, out: Extent) -> Extent:
    """(first, count) of the inputs at which outputs (first, count) look, those in the padding too."""
    first, count = out
    start = window.first(first)
    return start, window.last(first + max(1, count) - 1) - start + 1


def common(one: Extent, other: Extent) -> Extent:
    """(first, count) of what two extents have in common; a count of 0 where they do not meet."""
    first = max(one[0], other[0])
    return first, max(0, min(sum(one), sum(other)) - first)


def _met(own: Extent, read: Extent, window: Window | None) -> Extent:
    """(first, count) of what a rank has of what another one reads. Round the ends of a dim this is one piece too."""
    found = common(own, read)
    if window is None or not window.around or found[1]:
        return found
    if is_whole(window, own):
        return own
    first, count = common((own[0] - window.around, own[1]), read)
    return first + window.around, count


def padded_shape(shape: Shape, out: Shape, windows: dict[int, Window]) -> Shape:
    """The most that a rank computes outputs of shape `out` from: its piece of `shape`, halo and padding."""
    return tuple(_most(windows[d], out[d]) if d in windows else size for d, size in enumerate(shape))


def _most(window: Window, count: int) -> int:
    """The most inputs at which so many outputs in a row look."""
    return -(-(max(0, count - 1) * window.stride + window.reach) // window.parts)


def read_box(shape: Shape, outputs: Shape, windows: Mapping[int, Window], layout: Layout, mesh: Mesh,
             at: tuple[int, ...]) -> Box:
    """What the rank at `at` computes its outputs from, which may lie beyond the edges; arguments as `halo_elements`."""
    own, out = (extents(sizes, layout, mesh, at) for sizes in (shape, outputs))
    return tuple(wanted(windows[d], out[d]) if d in windows and not is_whole(windows[d], box) else box
                 for d, box in enumerate(own))


def halo_box(shape: Shape, outputs: Shape, windows: Mapping[int, Window], layout: Layout, mesh: Mesh,
             sender: tuple[int, ...], receiver: tuple[int, ...]) -> Box:
    """What the rank at `receiver` reads of the piece of that at `sender`; arguments as `halo_elements`."""
    read = read_box(shape, outputs, windows, layout, mesh, receiver)
    return tuple(_met(own, one, windows.get(d)) for d, (own, one) in enumerate(
        zip(extents(shape, layout, mesh, sender), read, strict=True)))


@lru_cache(maxsize=100_000)
def halo_elements(shape: Shape, outputs: Shape, windows: tuple[tuple[int, Window], ...], layout: Layout, mesh: Mesh,
                  coordinate: tuple[int, ...] | None) -> tuple[int, int]:
    """(elements sent, elements received) by a rank for the halos of one op.

        shape         of the input
        outputs       of the output: a windowed dim has the same position in both
        layout        of the input, whose windowed dims are split as those of the output
        coordinate    of the rank; None: the most that any rank sends, and receives
    """
    here = extents(shape, layout, mesh, coordinate or (0,) * len(mesh.axes))
    known, others, sends, receives = dict(windows), 1, [(1, 1)], [(1, 1)]
    for dim, size in enumerate(shape):
        if dim not in known:
            others *= here[dim][1]
            continue
        axes = tuple(a for a, state in enumerate(layout) if state == Split(dim))
        rows = _along(size, outputs[dim], known[dim], tuple(mesh.sizes[a] for a in axes))
        at = list(rows.values()) if coordinate is None else [rows[tuple(coordinate[a] for a in axes)]]
        sends = [(all_ * row[0], own * row[2]) for all_, own in sends for row in at]
        receives = [(all_ * row[1], own * row[2]) for all_, own in receives for row in at]
    sent, received = (others * max(all_ - own for all_, own in found) for found in (sends, receives))
    return sent, received


@lru_cache(maxsize=10_000)
def _along(size: int, out: int, window: Window, parts: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """By place of a piece of a dim cut by `parts`: what it gives to all, what it needs of all, and of itself."""
    mesh = Mesh((Axis("whole", 1), *(Axis(f"cut{i}", n) for i, n in enumerate(parts))))
    layout = Layout((B, *(Split(0) for _ in parts)))
    own, need = {}, {}
    for at in product(*(range(n) for n in parts)):
        own[at], out_here = (extents((n,), layout, mesh, (0, *at))[0] for n in (size, out))
        need[at] = own[at] if is_whole(window, own[at]) else wanted(window, out_here)
    return {at: (sum(_met(mine, other, window)[1] for other in need.values()),
                 sum(_met(other, need[at], window)[1] for other in own.values()), _met(mine, need[at], window)[1])
            for at, mine in own.items()}


def _each(value: Value, default: int | None) -> Shape:
    """The numbers of an argument; `default` where it is not given."""
    if isinstance(value, tuple):
        return tuple(int(str(n)) for n in value)
    return (int(value),) if isinstance(value, int) else () if default is None else (default,)


def _spread(values: Shape, count: int) -> Shape:
    """One number for every dim."""
    return values * count if len(values) == 1 else values

