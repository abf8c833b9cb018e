"""Rules of operators on images, volumes and signals: dims before the channels and the channels split, places do not.

    upsample            "b c . . -> b c . . | 0"                    linear in the image, whatever the interpolation
    linear, cubic       the same, and S(place) -> S(place)          with halos (`places`)
    nearest             "b c h w -> b c (h .:2) (w .:2) | 0"        by a whole number each place becomes a block
    im2col              "b c . . -> b (c .) . | 0"                  a column has every channel's window; col2im back
    pixel shuffle       "b (c .:4) h w -> b c (h .:2) (w .:2) | 0"  an image may be cut: each place becomes a block
    grid sampler        "b c . ., b i j . -> b c i j | 0"           every place of the grid looks anywhere in the image
    instance norm       "b c . ., c, c -> b c . ."
    max unpool          "b c . ., b c . . -> b c . . | 0"           a position is one within its own channel
"""

from math import prod

from autoddl.core.graph import Op
from autoddl.operators.rules.dimension_strings import Rule
from autoddl.operators.rules.nn import leading_dims_rule
from autoddl.operators.rules.places import halo_signatures
from autoddl.operators.rules.writing import RuleOf, Tensors, fixed, get, ints, names, rule_text
from autoddl.operators.windows import INTERPOLATED, place_name

__all__ = ["RULES"]


def _places(op: Op) -> int:
    """The number of dims of an image, a signal or a volume, which the operator's name ends with: `upsample_linear1d`.
    """
    return int(op.target.split(".")[1].removesuffix("_aa").removesuffix("d")[-1])


def _image(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Linear ops that treat each channel alone."""
    rule = leading_dims_rule(-_places(op), linear=True)(op, inputs, outputs)
    assert isinstance(rule, str)
    return rule


def _interpolated(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Linear and cubic interpolation: places are split as `places` says."""
    return Rule(_image(op, inputs, outputs), halo_signatures(op, inputs, outputs))


def _nearest(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Nearest neighbours: a place becomes as many as the factor says, where that is a whole number."""
    count = _places(op)
    lead = names(len(inputs[0].shape) - count)
    read, written = ["."] * count, ["."] * count
    for k, (size, out) in enumerate(zip(inputs[0].shape[-count:], outputs[0].shape[-count:], strict=True)):
        if size > 1 and out % size == 0:
            name = place_name(len(lead) + k)
            read[k], written[k] = name, f"({name} .:{out // size})"
    return rule_text([[*lead, *read]], [[*lead, *written]], " | 0")


def _windows(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """im2col(b c . .) and col2im(b (c .) .): the window is the inner factor of the columns."""
    image = inputs if op.target.startswith("aten.im2col") else outputs
    batch = names(len(image[0].shape) - 3, "b")
    window = prod(ints(op.arg("kernel_size")))
    sides = [[*batch, "c", ".", "."], [*batch, f"(c .:{window})", "."]]
    before, after = sides if image is inputs else reversed(sides)
    return rule_text([before], [after], " | 0")


def _shuffled(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """pixel_shuffle and pixel_unshuffle by a factor."""
    up = op.target.startswith("aten.pixel_shuffle")
    r = int(str(op.arg("upscale_factor" if up else "downscale_factor")))
    batch = names(len(inputs[0].shape) - 3, "b")
    sides = [[*batch, f"(c .:{r * r})", "h", "w"], [*batch, "c", f"(h .:{r})", f"(w .:{r})"]]
    before, after = sides if up else reversed(sides)
    return rule_text([before], [after], " | 0")


def _channel_shuffle(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    line = ["b", ".", *names(len(inputs[0].shape) - 2, "x")]
    return rule_text([line], [line], " | 0")


def _grid_sampler(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    found = names(len(inputs[0].shape) - 2, "g")
    image = ["b", "c", *(["."] * len(found))]
    return rule_text([image, ["b", *found, "."]], [["b", "c", *found]], " | 0")


def _affine_grid(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return rule_text([["b", ".", "."]], [["b", *(["."] * (len(outputs[0].shape) - 1))]], " | 0")


def _instance_norm(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    line = ["b", "c", *(["."] * (len(inputs[0].shape) - 2))]
    return rule_text([line, *(["c"] for _ in inputs[1:])], [line])


def _unpool(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    line = [*names(len(inputs[0].shape) - _places(op)), *(["."] * _places(op))]
    return rule_text([line, line], [line], " | 0")


def _meshgrid(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Input k is dim k of every output; with `xy` the first two change places."""
    letters = names(len(inputs))
    if any(len(t.shape) != 1 for t in inputs):
        return fixed(inputs, outputs)
    line = [letters[1], letters[0], *letters[2:]] if get(op, "indexing") == "xy" and len(inputs) > 1 else letters
    return rule_text([[a] for a in letters], [line] * len(outputs))


LINEAR = """_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default replication_pad1d.default
    replication_pad2d.default replication_pad3d.default"""

RULES: dict[str, RuleOf] = {
    **{f"aten.{target}": _image for target in LINEAR.split()},
    **{f"aten.{kind}{k}d.vec": _nearest for k in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"aten.adaptive_max_pool{k}d.default": leading_dims_rule(-k) for k in (1, 2, 3)},
    "aten.max_pool1d_with_indices.default": leading_dims_rule(-1),
    "aten.max_pool3d_with_indices.default": leading_dims_rule(-3),
    "aten.im2col.default": _windows,
    "aten.col2im.default": _windows,
    "aten.pixel_shuffle.default": _shuffled,
    "aten.pixel_unshuffle.default": _shuffled,
    "aten.channel_shuffle.default": _channel_shuffle,
    "aten.grid_sampler.default": _grid_sampler,
    "aten.affine_grid_generator.default": _affine_grid,
    "aten.instance_norm.default": _instance_norm,
    "aten.max_unpool2d.default": _unpool,
    "aten.max_unpool3d.default": _unpool,
    **dict.fromkeys(INTERPOLATED, _interpolated),
    "aten.meshgrid.default": _meshgrid,
    "aten.meshgrid.indexing": _meshgrid,
}
