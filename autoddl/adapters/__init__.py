"""Connects plans to the loops that train: a user's own, and those of other libraries.

Reading order:

    variants        `autoddl.parallelize`: a model that also plans evaluation and batches of other shapes
    rank_loader     batches of a data set of which a rank reads its own rows
    module          a user's own module whose call runs the plan, as other libraries call modules
    safetensors     weights of Hugging Face, read straight into pieces and written
    accelerate      accelerate's Accelerator with a plan
    transformers    the Trainer of transformers with a plan
    lightning       a strategy of Lightning's Trainer that runs a plan

The libraries are optional: `pip install 'autoddl[adapters]'`, and each is imported by its own file. May import `api`,
`runtime` and what these import.
"""
