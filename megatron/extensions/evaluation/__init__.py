"""Downstream tasks in lm-evaluation-harness' YAML form, run on the training model at any layout.

Flags: --eval-tasks, --eval-tasks-*. The harness itself evaluates checkpoints by `python -m megatron.lm_eval_model`.

Read `in_loop` first: the callback, its task, and how a run's model scores and continues texts. `task_file` reads task
files, `prompts` makes requests of their documents, `rows` rows of tokens and their batches, `scoring` runs these
through the pipeline and continues prompts, and `suite` and `metrics` turn results into scores.
"""
