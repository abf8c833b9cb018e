"""All that is known per operator: layouts, bytes, kernels.

Read `families` first: a row per family of operators, from which every list of operators is derived. Then `work` (flops
and bytes of an op's kernels), `kernel_kinds` (the measured curves), `fusion` (chains that a compiler makes one kernel
of), and the cupboards: `rules` (which layouts an op may have), `footprints` (what memory it needs and keeps), `kernels`
(what runs on one rank's pieces; the only one that imports torch).

To add an operator: a row of `families`, or its name in the row of its like; its rule in a file of `rules`; a footprint
if it keeps anything but its inputs; a kernel if its call says a global size or reduces. `tests/operators` tries every
signature of every rule against one device: add a case to `tests/support/op_cases*.py`.

May import `core` and `cost_models`.
"""
