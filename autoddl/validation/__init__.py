"""Predicts published runs and compares with what was measured.

Read in this order:

    runs, runs_file      the columns of a table of runs
    facts                YAML files of models, clusters and programs, with a source for each fact
    templates, layers    the model of a run as a graph
    run_parts, software  its sizes and stages, and what its program does
    run_as_plan          a run in the words of a plan
    as_plan, as_plan_bytes   its seconds and its peak bytes, as a plan has them
    intervals            how sure predictions are
    scores, validate     `autoddl validate`

Only the shell knows this room. May import `planner`, `pricing`, `schedule`, `operators`, `cost_models`, `capture` and
`core`.
"""
