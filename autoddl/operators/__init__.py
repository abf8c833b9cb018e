"""Has all that is known per operator: layouts, bytes, kernels.

Read in this order:

    families            a row per family of operators, from which every list of operators is derived
    own_facts           what an op of no table says of itself: its rule, its flops, what it keeps
    work                flops and bytes of an op's kernels
    expert_sizes        rows and widths of a mixture of experts on one rank
    windows             where convolutions and pools look, and the halos that pieces of images send each other
    flexible            masks and scores of FlexAttention, as text
    gate_expressions    the function between the two products of an expert, as text
    kernel_kinds        the measured curves that kernels follow
    fusion              chains of ops that a compiler makes into one kernel
    narrow_products     which products run in a narrower dtype, and what their casts move
    rules               the layouts that an op may have
    footprints          the memory that an op needs and keeps
    recomputed          the ops that backward runs again, of a block at a level
    kernels             the code that runs on one rank's shards; only this folder and `trials` import torch
    trials              runs a call on the pieces of every layout, and compares them with the whole

To add an operator:

    1. add a row to `families`, or its name to the row of its family
    2. write its rule in a file of `rules`
    3. write a footprint if it keeps anything but its inputs
    4. write a kernel if its call names a global size or reduces over ranks
    5. add a case to `tests/support/op_cases*.py`: `tests/operators` compares every signature of every rule with one
       device (`trials`)

May import `core` and `cost_models`.
"""
