"""Finds the best plan for a question, and builds a plan's question again.

Reading order:

    options, task          the question: one frozen value of options, the captured model, the cluster
    unused_options         options that would be without effect beside the others are refused
    microbatch_variants    the model with one of several microbatches; `batch_scaling` derives graphs of other sizes
    meshes, pins           the meshes that a cluster has, and the constraints of a user
    candidates             a mesh, a region of its plans, a number of microbatches
    mesh_search            the outer search over candidates; `search_jobs` on the processes of `process_pool`
    row_problems           one candidate's problems of rows of bytes, and the rows with the highest bounds
    budget_search          one candidate under a memory budget: where the budget's bound is proved (`peaks` draws memory
                           lines)
    regular                fewer kinds of blocks in the found plan, where they cost next to nothing (`mixtures`)
    assemble, bucket_size  a solution written down as a plan, with the best buckets
    question               a plan's problem again, for every later answer; `finish` writes the plan of a search
    overlap                the plan with the shortest time line
    pipelines              plans with stages, a room of its own
    strategies             strategies by name, like ZeRO-3
    degree_meshes          mesh and roles of a configuration that is given by degrees, like tp=8,dp=4

Others use `options.PlanOptions`, `task.task_of`, `mesh_search.search`, `question.rebuild`. May import `schedule`,
`pricing`, `operators`, `cost_models`, `search` and `core`; capture only where a model must be captured again.
"""
