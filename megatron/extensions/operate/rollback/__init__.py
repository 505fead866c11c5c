"""Rollback of a run at a spike: it returns to the state of some steps earlier, and skips the batches since then.

Flags: --rollback-on-spike, --rollback-steps, --rollback-batches, --max-rollbacks.

Read `decision` first: the state and the batches follow from the spike and the flags alone, so that every run with the
same spike decides the same. `held_states` keeps states in the memory of each rank, unless `peer_copies` does. `hooks`
has the callbacks.
"""
