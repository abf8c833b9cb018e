"""Says a plan in the configuration of another trainer, and reads such a configuration back.

    export    plan -> configuration -> the nearest that the target has -> priced -> text, and what was lost
    import    text -> configuration -> options of planning, and perhaps its price beside the found plan

Reading order:

    configuration    degrees of parallelism, pipeline, microbatches, precision and recomputation as one value
    describe         a plan as a configuration: what every axis of its mesh does; with `recompute_policy`
    nearest          the configuration that a target has and that is nearest, and what is lost on the way
    target           what a target can express, writes and reads
    megatron, torchtitan, deepspeed, accelerate, fsdp2     one target each; `options_text` reads options of all
    price            the best plan within a configuration
    exported         all of it together, as `autoddl export` and `autoddl import` say it

A target writes and reads text, and knows neither plans nor prices. May import `api`, `planner`, `pricing`,
`operators`, `cost_models` and `core`; no torch.
"""
