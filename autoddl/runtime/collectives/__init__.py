"""Runs conversions as collectives between ranks, and records what ran.

Reading order:

    redistribute           the steps of a conversion on tensors; `packing` cuts and joins their buffers, `coding` codes
                           them where a step says so
    process_groups         the groups of a mesh; `c10d_registry` reads torch's private list of groups
    transport              starts a group's collectives: of the library, by messages (`message_collectives`), or in
                            switches that reduce (`switch_collectives`)
    inside_kernels         collectives that a kernel waits for; `ring_shift` sends while it computes,
                           `halo_messages` to neighbours alone
    sparse_sum             adds up the largest values of gradients, and keeps the rest for the next step
    recorder               the collectives that ran
    told_values            small values that ranks tell each other

The rest of `runtime` imports these. They may import `schedule`, `cost_models` and `core`, torch, and of `runtime` only
`switches`.
"""
