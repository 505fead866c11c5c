"""Downstream tasks with lm-evaluation-harness on the training model, under any layout.

Flags: --eval-tasks, --eval-tasks-*. To evaluate checkpoints with the harness's own command, use `python -m
megatron.lm_eval_model`.

Start with `in_loop`, which contains the callback and a run's model for the harness. `harness` contains the tasks and
the class that the harness calls. `rows` forms token rows and their batches, `scoring` runs them through the pipeline,
and `continuation` continues prompts.
"""
