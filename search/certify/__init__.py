"""Proves bounds by code that does not import the solver.

Reading order:

    certificate, reparametrization   the form of a proof, and its check: where the bound of a problem is proved
    prove                            makes a proof from an elimination
    branch                           divides the space, where a budget binds
    min_marginals, alternatives      the least that another option would cost
    pipeline_paths, pipeline_cuts    checks the bound of all cuts of a chain into stages of a pipeline

Others use `certificate`, `prove`, `alternatives` and `pipeline_cuts`. The first two modules and the last two import
values of `core` alone, which a contract keeps so. The others may import `search`.
"""
