"""Goes on after a crash: checkpoints every N steps, written while the next steps run, and a start from the last one.

    from autoddl import recovery

    step = recovery.resume("checkpoints", model, optimizer, scheduler=scheduler, loader=loader)    # 0 at first
    with recovery.Keeper("checkpoints", every=100, keep=3) as keeper:
        for batch in loader:
            loss = model.step(batch)
            ...
            keeper.after_step(model, optimizer, scheduler=scheduler, loader=loader)

Reading order:

    other_states    states of schedulers, loaders and random numbers as bytes that are read without running anything
    keeper          when a checkpoint is written, and the thread that writes it
    resume          from the newest checkpoint of a series

The folder itself, its names and what a crash left there, is `checkpoint_series` of the room above.

Others use what is named here. May import `checkpoint` and what is below it.
"""

from autoddl.runtime.checkpoint_series import check_series, kept_steps
from autoddl.runtime.recovery.keeper import Keeper
from autoddl.runtime.recovery.resume import resume

__all__ = ["Keeper", "check_series", "kept_steps", "resume"]
