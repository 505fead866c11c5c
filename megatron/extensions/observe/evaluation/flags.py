"""Downstream evaluation flags (--eval-tasks), and registration of the callback. This module does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


def is_file(name: str) -> bool:
    """Return True if a value of --eval-tasks is a file or folder, and False if it is the name of one of the harness's
    built-in tasks."""
    return Path(name).exists() or name.endswith((".yaml", ".yml")) or "/" in name


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(EvalTasksConfig)
    if not own.eval_tasks:
        return
    flag, model = "--eval-tasks", config.model
    if config.tokenizer.tokenizer_type is None:
        yield Problem(flag, None, "reads text, which needs a tokenizer", "add --tokenizer-type and its files")
    factor = model.moe_eval_capacity_factor or model.moe_expert_capacity_factor
    if factor is not None and model.num_experts and factor * model.moe_router_topk < model.num_experts:
        rule = "experts with a capacity could drop tokens of a text in favour of the padding that follows the text"
        enough = f"--moe-eval-capacity-factor {model.num_experts / model.moe_router_topk:g}"
        yield Problem(flag, None, rule, f"add {enough}, which drops no tokens")
    if importlib.util.find_spec("lm_eval") is None:
        yield Problem(flag, None, "needs lm-evaluation-harness", "pip install 'paritrain[lm-eval]', or lm_eval")
    for name in own.eval_tasks:
        if is_file(name) and not Path(name).exists():
            yield Problem(flag, name, "there is no such file or folder", "correct the path")


@extension_flags("downstream tasks", may_change=True, rules=rules)
@dataclass(frozen=True)
class EvalTasksConfig:
    """Flags for downstream tasks that are evaluated during training, or on a checkpoint with --skip-train."""

    NO_EFFECT_WITHOUT: ClassVar = "--eval-tasks"

    eval_tasks: tuple[str, ...] | None = flag(None, many=True, path="local", names_code=is_file)
    """Task files of lm-evaluation-harness, folders of task files, or names of the harness's built-in tasks."""

    eval_tasks_interval: int | None = flag(None, at_least=0)
    """Number of iterations between evaluations of --eval-tasks. 0 evaluates only at the end. Default:
    --eval-interval."""

    eval_tasks_limit: int | None = flag(None, above=0)
    """Number of documents evaluated per task, from the start of its split. Default: all."""

    eval_tasks_num_fewshot: int | None = flag(None, at_least=0)
    """Number of few-shot examples. This number overrides num_fewshot in the task files, except for tasks that set
    num_fewshot to 0."""

    eval_tasks_batch_tokens: int | None = flag(None, above=0)
    """Number of tokens in one forward pass of one model replica. Default: micro-batch-size * seq-length."""

    eval_tasks_samples: str | None = flag(None, path="local", writes="folder")
    """Folder for per-document results (log-likelihoods, generated text, scores). Each evaluation writes one JSON lines
    file."""


CALLBACKS.register(
    "evaluation tasks",
    f"{__package__}.in_loop:EvalTasks",
    when=lambda config: bool(config.options(EvalTasksConfig).eval_tasks),
    evaluates="--eval-tasks",
)
