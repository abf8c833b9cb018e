"""Proves bounds by code that does not import the solver.

Reading order:

    certificate, reparametrization   the form of a proof, and its check: where the bound of a problem is proved
    prove                            makes a proof from an elimination
    branch                           divides the space, where a budget binds
    min_marginals, alternatives      the least that another option would cost

Others use `certificate`, `prove` and `alternatives`. The first two modules import problems and tables of `core` alone,
which a contract keeps so. The others may import `search`.
"""
