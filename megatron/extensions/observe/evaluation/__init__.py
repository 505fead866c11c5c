"""Evaluation of the training model on downstream tasks with lm-evaluation-harness, under any parallel layout.

Flags: --eval-tasks, --eval-tasks-*. To evaluate checkpoints with the harness's own command, use `python -m
megatron.lm_eval_model`.

Start with `in_loop`, which contains the callback and adapts a run's model for the harness. `harness` contains the
evaluation tasks, and the model class through which the harness calls the model. `rows` creates token rows and batches
of rows. `scoring` runs rows through the pipeline, and `continuation` continues prompts.
"""
