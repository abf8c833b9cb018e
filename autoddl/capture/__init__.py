"""Turns a module and an example batch into a graph of whole operators.

Reading order:

    sample                      the arguments of one call of the model
    trace                       torch.export; `export_guards` keeps it from effects that a graph would not show
    own_rules                   rules that users register for operators of their own
    tried_rules                 rules of operators without one, found by trying
    wrappers                    what is around a module and not in its graph
    rewrites                    of the exported program, until a graph knows each of its nodes: a room of its own
    build_graph                 fx nodes to `core.graph`
    capture                     runs all of these
    factory                     finds a user's model by `FILE.py:NAME`
    same_model                  says how a module is not the one that a plan was made for
    materialize, float64        tensors to run a captured program with, and the program in float64
    patches                     of torch and transformers, each named after what it patches
    fx_tools, source_lines, gc_pause     helpers

Others use `capture.capture`, `sample.sample_for`, `factory.Factory`, `materialize.arguments`. May import `operators`
and `core`.
"""
