"""The callback of --eval-tasks. No torch."""

from __future__ import annotations

from megatron.training.hooks import CALLBACKS

CALLBACKS.register(
    "evaluation tasks",
    "megatron.extensions.evaluation.in_loop:EvalTasks",
    when=lambda config: bool(config.eval_tasks.eval_tasks),
)
