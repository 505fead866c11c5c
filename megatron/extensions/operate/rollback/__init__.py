"""Rollback after a loss spike: the run returns to an earlier state and skips the batches that followed this state.

Flags: --rollback-on-spike, --rollback-steps, --rollback-batches, --max-rollbacks.

Read `decision` first. The choice of the state and of the skipped batches depends only on the iteration of the spike,
the flags and earlier rollbacks, so that a resumed run makes the same choice. `held_states` keeps states in the memory
of each rank, unless `peer_copies` keeps them. `hooks` contains the callback.
"""
