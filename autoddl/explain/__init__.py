"""Questions about a plan, a model or a run, answered as values; the shell prints them.

Reading order: `explain` (why a plan is as it is, what else there is, the certificate of its bound), `breakdown`
(seconds and bytes by block), `pareto` (what `autoddl front` computes: seconds against bytes, or against devices),
`relax` (what would fit where nothing does), `diff` (two plans), `compare_run` and `record_statistics` (a plan and the
record of its run), `communication_share` and `data_parallel_work` (`autoddl network`).

May import `planner`, `schedule`, `pricing`, `operators`, `cost_models`, `search` and `core`; no torch.
"""
