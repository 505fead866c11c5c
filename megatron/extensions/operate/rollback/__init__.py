"""Rollback after a loss spike: the run returns to an earlier state and skips the batches that followed this state.

Flags: --rollback-on-spike, --rollback-steps, --rollback-batches, --max-rollbacks.

Read `decision` first. The state and the skipped batches depend only on the spike and the flags, so that all runs with
the same spike make the same decision. `held_states` keeps states in the memory of each rank, unless `peer_copies` keeps
them. `hooks` contains the callback.
"""
