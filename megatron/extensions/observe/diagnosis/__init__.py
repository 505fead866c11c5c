"""Diagnosis of errors and performance: NaNs, diverging layers, slow ranks, profiles and traces.

Flags: --log-layer-stats, --layer-growth-threshold, --check-replicas, --log-straggler, --straggler-minmax-count,
--profile and --trace with related flags, --record-memory-history, --check-for-spiky-loss, --check-for-large-grads. Two
kinds of diagnosis need no flag: the search for the origin of a non-finite loss or gradient, and the search for the rank
that causes a hang (`hang_analysis`).

Start with `flags`, which lists the callbacks. `nonfinite_search` finds the origin of a NaN. `step_dump` saves the step
that ends a run, and `step_replay` runs this step again (tools/replay_step.py).
"""
