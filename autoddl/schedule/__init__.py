"""One step of a plan as plain values: what is sent, when, and what is held.

Reading order:

    parameter_protocol   when parameters are gathered and gradients reduced: one state machine for all that act it out
    buckets              which gathers and gradients travel together
    issue_order          in which order collectives are started
    traffic              what a rank sends, step by step
    timeline             when: the predicted step of one rank
    memory_line          what is held: the predicted bytes of one rank, with `memory_*` as its parts
    message_programs     rings and rounds over point-to-point messages; uplink_bytes: what they put on each link

Others use `timeline.timeline_of`, `memory_line.with_memory`, `traffic.traffic`, `buckets`. May import `pricing`,
`operators`, `cost_models` and `core`; no torch.
"""
