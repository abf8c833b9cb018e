"""Predicts published runs and compares with what was measured.

Reading order: `runs` and `runs_file` (the columns of a table of runs), `facts` (YAML: what is known of models, clusters
and programs, with a source each), `templates` and `layers` (a run's layers), `price_part` and `part` (seconds and bytes
of one), `step` (put together), `scores` and `validate` (`autoddl validate`).

Only the shell knows this room. May import `planner`, `pricing`, `schedule`, `operators`, `cost_models`, `capture` and
`core`.
"""
