"""Connects plans to the loops that train: a user's own, and those of other libraries.

Reading order:

    variants        `autoddl.parallelize`: a model that also plans evaluation and batches of other sizes
    module          a user's own module whose call runs the plan, as other libraries call modules

`variants` is what `autoddl.parallelize` is. May import `api`, `runtime` and what these import.
"""
