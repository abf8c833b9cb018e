"""Ranks on this machine: run a plan, verify it, rehearse it on shaped links.

Reading order: `launch` (starts ranks and ends them all when one dies), `forked_ranks` (imports torch once for all),
`worker` and `jobs` (what a rank is told), `train` and `run` (train under a plan), `verify` and `check` (against one
process), `shaped_network` (network namespaces and `tc`: where links are shaped), `rehearse` and `rehearse_rank` (a run
on such links), `places` and `machine` (cores and memory here).

Others use `launch.launch`, `run.run`, `verify.verify`, `rehearse.rehearse`. May import `runtime` and all below it.
"""
