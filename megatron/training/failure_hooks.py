"""Hooks that explain an error which ends a run, before the run's report is made of it. No torch.

What they find out they add as notes, `error.add_note(text)`, which tracebacks show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.registry import Registry
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch


@dataclass(frozen=True)
class FailureFacts:
    """What is known of a failure hook before it is imported."""

    errors: tuple[str, ...] = ("BaseException",)
    """Names of the classes of the errors that it explains: nothing is imported for others, as other ranks wait."""


FAILURE_HOOKS: Registry[Any, FailureFacts] = Registry("failure hook", FailureFacts, "error, config, launch, run")
"""What a hook adds, as "plan of the memory" -> `explain(error, config, launch, run)`, called on the rank that raised
`error`; `run` is the `TrainingRun`, or None before it has been built."""


def explain_failure(error: BaseException, config: RunConfig, launch: Launch, run: Any) -> None:
    """Calls the hooks for errors of this class. What one raises must not hide the first error: it becomes a note."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for name in FAILURE_HOOKS:
        if not kinds.isdisjoint(FAILURE_HOOKS.facts(name).errors):
            try:
                FAILURE_HOOKS[name](error, config, launch, run)
            except Exception as failure:
                error.add_note(f"no {name}: {type(failure).__name__}: {failure}")
