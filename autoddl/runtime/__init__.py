"""Runs a plan on real tensors: the work of one rank.

Reading order:

    world, process_groups  the rank, and a group for every set of mesh axes
    lowering               the plan's graph as a program on pieces
    redistribute           one step of a conversion as a collective; message_collectives: over point-to-point messages
    parameters, parameter_store, parameter_gather    sharded parameters, gathered in buckets
    gradient_reducer       gradient buckets: filled in backward, sent when they are full
    parallelize            all of it as a module with `step`
    checkpoint             save and load, by any plan of the model
    recorder, record_writer    what was sent and when

Others use `parallelize.parallelize`, `checkpoint`. May import `schedule`, `capture`, `operators`, `cost_models` and
`core`.
"""
