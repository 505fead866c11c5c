"""Diagnosis of a run's errors and time: NaNs, layers that drift, slow ranks, profiles and traces.

Flags: --log-layer-stats, --layer-growth-threshold, --check-replicas, --log-straggler, --straggler-minmax-count,
--profile and --trace with related flags, --record-memory-history, --check-for-spiky-loss, --check-for-large-grads.
Without any flag, a step whose loss or gradient is not finite is searched, and a hang is traced to the rank that others
wait for (`hang_analysis`).

Read `flags` first: it names the callback of each. `nonfinite_search` finds the origin of a NaN, `step_dump` saves the
step that ends a run, `step_replay` runs it again (tools/replay_step.py).
"""
