"""Times this machine and writes what it found into a cluster file.

Read in this order:

    measure                       `autoddl measure`: starts the ranks and writes the file
    request, rank                 the question that ranks are asked, and their program
    kernel_cases, kernel_timing   the kernels that are timed, and how
    link_timing, contention       collectives, and ranks that share links or cores
    fits                          constants of levels and hosts that come nearest to the times
    machine_speed                 the speed of the machine from one minute to the next
    machine_facts                 `autoddl init`: what the machine says of itself, untimed; `written_cluster` writes it

Others use `measure.measure` and `written_cluster.cluster_text`. May import `launch`, `runtime` and all below them.
"""
