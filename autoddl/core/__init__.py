"""Defines the values that every stage hands on to the next, and their text forms.

Reading order:

    errors                 everything that AutoDDL raises on purpose
    layout, conversion     meshes, SBP layouts, and the steps between two layouts
    codecs, sparse         ways to send fewer bytes: coded values, and sums of the largest alone
    state_layouts          where weights, gradients and optimizer state of a parameter are split
    graph, hubs            the captured model as a table of operators, and the graph that is planned
    precision, recompute   recipes of dtypes, and blocks that backward computes again
    cost_table, problem    a cost network: tables of seconds and bytes over variables, and its solution
    plan                   the result of planning, as JSON
    pipeline, pipeline_schedules     schedules of pipelines as text, and their generators
    pipeline_cuts          chains of blocks to be cut into stages, paths that bound their seconds, proofs;
                           `pipeline_proofs` writes and reads these
    stages                 the graphs of a pipeline's stages, and what they send each other
    record                 the record file of a run: the collectives of every rank and step, and when they ran
    layout_codes           layouts as integers, for arrays of thousands of them
    names, files, processes          folded names, safe writing of files, signals and ranks

Other rooms may use all of it. This room imports nothing of ours from outside, and never torch. It knows no prices; only
`files`, `plan` and `record` read or write files, and only `processes` speaks to the system.
"""
