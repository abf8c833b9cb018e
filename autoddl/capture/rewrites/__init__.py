"""Rewrites programs of torch.export until every node is an operator that a graph knows.

Reading order:

    export_passes, passes       rewrites of the exported program, before and after it is functional
    written_values              makes it functional, where it is plain what writes in place change
    raising_branches            branches that only raise, which a graph checks instead
    finite_clamps               branches that clamp infinite values, which may always be taken
    own_backward                calls of torch.autograd.Function, which become one operator each
    randomness                  draws of random numbers, by position
    drawing                     the calls that it inserts
    drawn_variates              draws whose numbers are tensors
    recurrent_dropout           recurrent layers with dropout between them
    complex_products            rotations by complex numbers and writes into them, in real ones
    ctc_losses                  losses of sequences as an operator
    growing_lists               concatenations of growing lists, as chains
    gate_text                   the function between the products of an expert, as text
    autocast                    the casts of bf16-mixed
    autocast_region, autocast_casts      regions of autocast in the module itself, and the casts that they make

`capture` and `trace` of the room above run them. May import `fx_tools`, `source_lines`, `operators`
and `core`.
"""
