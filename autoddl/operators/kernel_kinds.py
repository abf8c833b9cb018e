"""The measured curves that kernels follow; the table of families (`families`) says which operator follows which.

Products, convolutions and attention have kinds of their own (`work`). What the others take differs by how much they
compute an element, whether they walk in rows, and whether they jump:

    add            two inputs, one output; backward is the adding up of gradients
    multiply       two inputs, one output; backward the same twice
    copy           one input, one output: casts, joins, negations, masks, relu
    exponential    copies that compute a transcendental function of each element
    reduce         many elements to one: sums, means, gradients of what was broadcast
    normalise      rows that are read for their statistics and again to be scaled
    batch normalise    the same of channels
    gather         rows of a table by index; backward adds them up where they came from
    index          elements by index, in whatever dims; backward likewise; both of blocks where rows are long (`work`)
    pool           windows of images
    loss           logarithm of a softmax, and one element of each row

Classes and not operators, so that a curve holds for operators that nobody timed.
"""

from autoddl.operators.families import family_of

__all__ = ["kind_of"]


def kind_of(name: str) -> str:
    """The kind of memory work of the operator `name`, like `aten.gelu`; a copy where nothing else is known."""
    return family_of(name).curve
