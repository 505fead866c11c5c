"""Rules of --eval-tasks. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.evaluation.flags import EvalTasksConfig
from megatron.extensions.evaluation.task_file import read_tasks
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    options, model = c.options(EvalTasksConfig), c.model
    if not options.eval_tasks:
        return
    if c.tokenizer.tokenizer_type is None:
        yield Problem("--eval-tasks", None, "reads text, which needs a tokenizer", "add --tokenizer-type and its files")
    factor = model.moe_eval_capacity_factor or model.moe_expert_capacity_factor
    if factor is not None and model.num_experts and factor * model.moe_router_topk < model.num_experts:
        rule = "experts with a capacity would drop tokens of a text for the filling behind it"
        enough = f"--moe-eval-capacity-factor {model.num_experts / model.moe_router_topk:g}"
        yield Problem("--eval-tasks", None, rule, f"add {enough}, with which none is dropped")
    try:
        read_tasks(options.eval_tasks, options.eval_tasks_num_fewshot)
    except ValueError as error:
        yield from Problem.of_errors("--eval-tasks", None, error)
