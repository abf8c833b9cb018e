"""Turns a module and an example batch into a graph of whole operators.

Reading order:

    sample                      the arguments of one call of the model
    trace                       torch.export; `export_guards` keeps it from effects that a graph would not show
    ctc_losses                  losses of sequences as an operator
    raising_branches            branches that only raise, which a graph checks instead
    own_backward                calls of torch.autograd.Function, which become one operator each
    own_rules                   rules that users register for operators of their own
    tried_rules                 rules of operators without one, found by trying
    wrappers                    what is around a module and not in its graph
    export_passes, passes       rewrites of the exported program, before and after it is functional
    randomness                  draws of random numbers, by position
    complex_products            rotations by complex numbers, in real ones
    gate_text                   the function between the products of an expert, as text
    autocast                    the casts of bf16-mixed
    autocast_region, autocast_casts      regions of autocast in the module itself, and the casts that they make
    build_graph                 fx nodes to `core.graph`
    capture                     runs all of these
    factory                     finds a user's model by `FILE.py:NAME`
    materialize, float64        tensors to run a captured program with, and the program in float64
    patches                     of torch and transformers, each named after what it patches
    fx_tools, source_lines, gc_pause     helpers

Others use `capture.capture`, `sample.sample_for`, `factory.Factory`, `materialize.arguments`. May import `operators`
and `core`.
"""
