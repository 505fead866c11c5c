"""Rollback of a run at a spike: it goes back to the state of some steps before, and passes over the batches since then.

Flags: --rollback-on-spike, --rollback-steps, --rollback-batches, --max-rollbacks.

Read `decision` first: the state and the batches, which follow from the spike and the flags alone, so that every run
with the same spike does the same. `held_states` keeps states in the memory of each rank, unless `peer_copies` does.
`hooks` has the events of a run.
"""
