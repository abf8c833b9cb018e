"""Simulates tasks on the streams of ranks, and bounds what a pipeline of them takes.

Reading order:

    events             when tasks start and end that wait for one another
    timeline           tasks of one rank: computation, and collectives beside it
    pipelines          tasks of all ranks of a pipeline, by its schedule
    pipeline_bounds    paths of a pipeline, below its seconds whatever its stages take

Seconds are given: nothing here prices a kernel or a message.
"""
