"""Proves bounds by code that does not import the solver.

Reading order: `certificate` and `reparametrization` (what a proof is, and how it is checked: where the bound of a
problem is proved), `prove` (makes one), `branch` (a budget that binds: pieces of the space), `min_marginals` and
`alternatives` (what another option would cost at least).

`certificate` imports problems and tables alone: a contract keeps it so.
"""
