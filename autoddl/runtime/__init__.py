"""Runs a plan on real tensors, on one rank.

Reading order:

    parallelize            a module and a plan -> a model that trains
    parallel_model         that model, whatever its plan
    mesh_model             for plans without stages; `program_runner` runs its program
    pipeline_model         for plans with stages; `stage_setup` prepares it, `stage_transport` sends between
                           stages
    gradients_together     adds up gradients of parameters that several stages have; clips gradients by their norm
    step_graph             its steps as one CUDA graph
    world                  joins the processes, and compares what they are about to run
    parameters             the module's parameters, replaced by the pieces that this rank stores
    guards                 refuses optimizers that do not update pieces, moves of the module, states of other models
    whole_state            its tensors, whole, on rank 0, one at a time
    parameter_store        values on the way to the program (`parameter_gather`), gradients back (`gradient_reducer`)
    lowering               the captured program -> the program of this rank, as generated code
    weight_gradients       gradients of weights apart from those of activations, where a schedule splits backward
    recompute              what autograd saves of it: tensors, or notes of what is gathered or computed again
    collectives            conversions as collectives between ranks, and what ran: a room of its own
    switches               sums in switches that reduce, and a rank's connection to them: a room of its own
    outputs                what a call returns besides the loss: split, or gathered
    batches                the global batch -> the pieces of this rank
    checkpoints            saves under one plan, loads under any other, and goes on after a crash: a room of its own

Others use parallelize, `checkpoints`, world, lowering, and the groups, steps and recorder of `collectives`. This
room may import `capture`, `schedule`, `pricing`, `operators`, `cost_models` and `core`, and torch.
"""
