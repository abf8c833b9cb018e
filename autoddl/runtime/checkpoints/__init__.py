"""Saves under one plan and loads under any other; writes checkpoints beside the steps, and goes on after a crash.

    from autoddl import recovery

    step = recovery.resume("checkpoints", model, optimizer, scheduler=scheduler, loader=loader)    # 0 at first
    with recovery.Keeper("checkpoints", every=100, keep=3) as keeper:
        for batch in loader:
            loss = model.step(batch)
            ...
            keeper.after_step(model, optimizer, scheduler=scheduler, loader=loader)

Reading order:

    checkpoint           saves and loads one; `autoddl.checkpoint`
    checkpoint_reader    reads its files, and runs nothing that they name
    state_collector      collects the state for one save after another
    staging              copies a state, so that training goes on while it is written
    repeated_planner     plans a save once for many
    checkpoint_writer    writes the files, a tensor at the price of its bytes
    checkpoint_folder    what may be replaced in a folder
    checkpoint_series    the names of many in one folder, and what a crash left there
    checkpoint_settings  the settings of an optimizer, as one value
    own_keys             what a user keeps in the state of an optimizer, beside what it makes itself
    residual_state       what sparse sums have not sent yet
    other_states         states of schedulers, loaders and random numbers, as bytes whose reading runs nothing
    state_pieces         pieces in such states, as of averaged weights
    same_states          compares such states among the ranks
    keeper               when a checkpoint is written, and the thread that writes it
    resume               from the newest checkpoint of a series

Others use `checkpoint` and what is named here. May import what `runtime` may, and its files.
"""

from autoddl.runtime.checkpoints.checkpoint_series import check_series, kept_steps
from autoddl.runtime.checkpoints.keeper import Keeper
from autoddl.runtime.checkpoints.resume import resume

__all__ = ["Keeper", "check_series", "kept_steps", "resume"]
