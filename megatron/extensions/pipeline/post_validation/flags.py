"""Registers optimizer post-validation and defines its flag. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.extensions import extension_flags
from megatron.training.step_parts import STEP_PARTS

HERE = "megatron.extensions.pipeline.post_validation"


@extension_flags(
    "optimizer post-validation",
    may_change=True,
    rules=f"{HERE}.rules:post_validation",
    resolve=f"{HERE}.rules:without_use",
)
@dataclass(frozen=True)
class PostValidationFlags:
    optimizer_post_validation: bool = flag(
        False, excludes="--fp8-param-gather: a rollback gathers parameters in the dtype of the parameters, not in fp8"
    )
    """Update the parameters of a pipeline stage before the gradients of other stages are complete, and check the global
    gradient norm after the first forward passes of the next step, so that no rank waits between steps. A step that must
    be clipped or skipped is rolled back bit-exactly and repeated (arXiv 2401.10241, section 4)."""


STEP_PARTS.register(
    "post-validation",
    f"{HERE}.post_validation:PARTS",
    when=lambda config: config.options(PostValidationFlags).optimizer_post_validation,
    kept=lambda rank: rank.gradients + rank.main,
    kept_name="copies for a rollback",
)
