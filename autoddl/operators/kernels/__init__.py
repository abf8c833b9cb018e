"""Has the code that an operator runs on one rank's shards.

    table           looks up the kernel of an op; most ops run unchanged
    nn, shape       kernels whose calls name global sizes, or that do not run unchanged on shards
    reducing        kernels that reduce over mesh axes by themselves
    halo            windows over pieces of images, whose borders neighbours send
    flexible        FlexAttention
    flexible_pieces its call on a rank's pieces
    ring, halves    attention of a split sequence: keys that come by, halves that ranks trade
    custom_ops      our own operators, like dropout with a numbered mask
    draws           random numbers by position
    quantiles       laws whose numbers are tensors, of uniform numbers by position
    site            the rank and the layouts for which a kernel runs
    arguments       the arguments of a call by name
"""
