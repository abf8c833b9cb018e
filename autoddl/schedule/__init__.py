"""Predicts one training step of a plan as values: collectives that are sent, when they run, and bytes in use.

Nothing is executed here: the runtime follows these orders, and `verify` compares the collectives that ran with them.
Reading order:

    traffic              every collective of a step, in the order of the program
    buckets              parameters that are gathered or reduced together
    parameter_protocol   when buckets are gathered and reduced: one state machine for tensors, seconds and bytes
    issue_order          the actions of a rank, in order (`actions`), with parameters by `parameter_order`
    timeline             those actions on streams: the predicted time line
    memory_line          bytes in use at every moment; `memory_program` parses the plan, `memory_forward`,
                         `memory_backward`, `memory_gathers`, `memory_reductions` and `memory_conversions` act it out
    stage_actions        what every rank of a pipeline does, sends and receives, in order; free of circles
    stage_lanes          what stages send each other in a step, as `stage_messages` between their ranks
    stage_seconds        the seconds of a stage in parts, for the time line of a pipeline
    run_step             the seconds of a step as a training program runs it, by its software profile
    message_programs     collectives that are lists of messages between ranks
    uplink_bytes         bytes that leave each unit of a network

Others use traffic, buckets, parameter_protocol, message_programs, timeline, memory_line, uplink_bytes and stage_*. This
room may import `pricing`, `operators`, `cost_models` and `core`; it never imports torch.
"""
