"""Lists the layouts that each operator may have.

Rules, one file for each kind of operator:

    matmul          products, einsum, convolutions
    nn              norms (layer norm among them), softmax, attention, embedding, dropout, pooling
    places          places of images and sequences, whose windows look over the edges of pieces
    elementwise     pointwise operators
    reduce          reductions and scans
    shape           reshapes and permutations
    cut             operators that cut and join
    index           reads and writes at given positions
    loss            losses
    flexible        FlexAttention
    spectra         complex numbers, Fourier transforms

They are built with these files:

    dimension_strings   parses rules like `b k, n k -> b n`
    writing             helpers for writing them
    table               looks up an operator's rule and lists its options on a mesh
    infinite            finds tensors with infinities, like masks: summands may not be multiplied by them

To add an operator, see `autoddl/operators/__init__.py`.
"""
