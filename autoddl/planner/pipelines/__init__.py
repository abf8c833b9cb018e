"""Finds the best plan with stages: cuts, stage meshes, microbatches, schedules and the layouts inside together.

Reading order:

    staged                a pipeline to be planned: its cuts, its schedule, the part of the cluster of a stage
    stored_once           what stages on the same ranks would count twice
    staged_steps          the step of a pipeline: seconds of stages and transfers, and the time line
    stage_plans           a plan for every stage of a cut, and the whole that they make
    stage_ports           what messages between stages take, by the layouts at both ends
    stage_prices          stages whose bytes have a price
    shared_budget         the budget of a rank that has several stages
    cut_places            where a model may be cut
    stage_units           what lies between two cuts: what it takes at least, and which stages are alike
    solved_stages         the layouts of stages by themselves, each searched once
    stage_parts           bounds of stages and of what they are made of
    tied_stages           stages on the same ranks that share a parameter
    joint_stages          the layouts of all stages of one cut, together
    listed_plans          plans of the stages of one cut, each looked at, where they are few
    rank_memory           the stages of a rank, together within its memory
    cut_problems          what is known of stages, as the problem over the cuts of one candidate
    pipeline_candidate    one number of stages and microbatches with one schedule: its bound, and its best cut
    candidate_runs        candidates one after another or on several processes, until nothing is gained or time is over
    pipeline_search       all candidates, with one bound
    uniform_pipelines     pipelines as Megatron has them, as a baseline

May import the rest of `autoddl.planner` but `finish` and what stands on it.
"""
