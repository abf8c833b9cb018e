"""Predicts published runs and compares with what was measured.

Read in this order:

    runs, runs_file      the columns of a table of runs
    facts                YAML files of models, clusters and programs, with a source for each fact
    templates, layers    the layers of a run as graphs
    price_part, part     seconds and bytes of one part of a model
    step                 the parts put together to a step
    run_as_plan, as_plan a run in the words of a plan, and its seconds as a plan has them
    scores, validate     `autoddl validate`

Only the shell knows this room. May import `planner`, `pricing`, `schedule`, `operators`, `cost_models`, `capture` and
`core`.
"""
