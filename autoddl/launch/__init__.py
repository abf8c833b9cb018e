"""Starts ranks on this machine, to run a plan, verify it, or rehearse it on shaped links.

Read in this order:

    launch                    starts ranks, and ends them all when one dies
    forked_ranks              imports torch once for all ranks, which are forks of one process
    temporary                 folders of a launcher, removed by the next one where it was killed
    jobs, worker              the files between a launcher and its ranks, and the program of a rank
    train, run                train under a plan; `record_writer` writes what was recorded; `elastic` has the plans that
                              are run when ranks are lost
    verify, check             compare a plan with one process
    shaped_network            network namespaces and `tc`: links are shaped here
    switches, switch          switches of it that reduce, each a process in its switch's namespace
    rehearse, rehearse_rank   a run on shaped links
    places, machine           where ranks start, and the cores and memory of this machine

Others use `launch.launch`, `run.run`, `verify.verify`, `rehearse.rehearse`. May import `runtime` and all below it.
"""
