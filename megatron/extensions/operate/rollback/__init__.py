"""Rollback at a spike: the run returns to an earlier state and skips the batches consumed after that state.

Flags: --rollback-on-spike, --rollback-steps, --rollback-batches, --max-rollbacks.

Read `decision` first. The state and the skipped batches depend only on the spike and the flags, so that every run with
the same spike makes the same decision. `held_states` keeps states in the memory of each rank, unless `peer_copies` does
so. `hooks` contains the callbacks.
"""
