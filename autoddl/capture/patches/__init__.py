"""Patches torch and transformers while a model is traced; a test compares each with what is installed.

Each file `NAME_patch` is named after what it patches:

    autograd_function       calls of torch.autograd.Function, met by a trace
    torch_autocast          regions of autocast, entered while a model is traced
    torch_checkpoint        blocks that torch.utils.checkpoint wraps, noted
    torch_distributions     numbers that are tried until one is kept, in a fixed number of tries
    torch_export            generated code and stack frames that nobody reads, left out
    torch_parameters        parameters without memory while a model is made
    transformers_experts    layers of experts as operators
    transformers_masks      masks built as a run builds them
    transformers_switch     layers of experts with a capacity as operators

May import what `autoddl.capture` may, and of it `gate_text` alone.
"""
