"""Answers questions about a plan, a model or a run as values; the shell prints them.

Reading order:

    explain                 why a plan is as it is, what other choices cost, and the certificate of its bound
    rows                    checks the rows of bytes that a bound under a budget rests on: a room of its own
    breakdown               seconds and bytes by block; `axis_splits` says what each mesh axis splits
    utilisation             model-FLOP utilisation
    pareto                  `autoddl front`: plans of least seconds against bytes, or against devices
    cluster_facts           `autoddl cluster`: what was understood of a cluster file
    relax                   what would fit where no plan does
    rows_that_meet          where microbatches compute another loss than the whole batch
    diff                    two plans
    network_choice          the cheapest network on which a step takes at most so long
    what_if                 the plan of the same question under a changed cluster (`changed_cluster`)
    compare_run             a plan and the record of its run, with `record_statistics`; with stages `staged_run`
    message_sizes           what the ranks of a plan send: kinds, groups, sizes, bytes by level; beside a record
    run_seconds             a plan's step as the program of a software profile runs it
    communication_share     `autoddl network`: the share of communication in data parallel steps, with
                            `data_parallel_work`

May import `planner`, `schedule`, `pricing`, `operators`, `cost_models`, `search` and `core`; no torch.
"""
