"""Downstream tasks of lm-evaluation-harness, run by the harness on the training model at any layout.

Flags: --eval-tasks, --eval-tasks-*. The harness' command evaluates checkpoints: `python -m megatron.lm_eval_model`.

Read `in_loop` first: the callback, its task, and a run's model for the harness. `harness` is the class that the harness
calls, and its tasks; `rows` makes rows of tokens and their batches, `scoring` runs these through the pipeline, and
`continuation` continues prompts.
"""
