"""Times this machine and writes what it found into a cluster file.

Reading order: `measure` (`autoddl measure`: what is timed, in which order), `kernel_cases` and `kernel_timing`,
`link_timing` and `contention` (ranks that share links or cores), `fits` (curves through the times), `machine_speed`,
and `request` and `rank` (what the ranks are told, and do).

Others use `measure.measure`. May import `launch`, `runtime` and all below them.
"""
