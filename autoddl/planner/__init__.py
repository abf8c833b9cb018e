"""From a question to the best plan, and from a plan back to its question.

Reading order:

    options, task      what is asked: one frozen value of options, the captured model, the cluster
    meshes, pins       the meshes that a cluster has, and what a user fixes
    candidates         a mesh, a region of its plans, a number of microbatches
    mesh_search        the outer search over candidates; search_jobs: what its workers do
    budget_search      one candidate under a budget: where the bound of a budget is proved (`peaks` draws memory lines)
    assemble           a solution written down as a plan; bucket_size: with the best buckets
    question           a plan's problem again, for every later answer
    overlap, strategies, batch_scaling, bucket_size    the shortest time line; strategies by name; scaled graphs

Others use `options.PlanOptions`, `task.task_of`, `mesh_search.search`, `question.rebuild`. May import `schedule`,
`pricing`, `operators`, `cost_models`, `search` and `core`; capture only where a model must be captured again.
"""
