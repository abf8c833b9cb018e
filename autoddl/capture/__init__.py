"""Turns a module and an example batch into a graph of whole operators.

Reading order: `sample` (what the model is called with), `trace` (torch.export and what it is kept from), `passes` (one
name per meaning), `export_passes` (what is rewritten before anything is made functional), `autocast` (the casts of
bf16-mixed) with `autocast_region` and `autocast_casts` (a module's own), `build_graph` (nodes to `core.graph`), and
`capture`, which runs them. `factory` finds a user's model by `FILE.py:NAME`; `materialize` and
`float64` make real weights of a captured program.

Others use `capture.capture`, `sample.sample_for`, `factory.Factory`, `materialize.arguments`. May import `operators`
and `core`.
"""
