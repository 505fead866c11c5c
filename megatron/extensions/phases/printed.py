"""Stages as plans and logs print them. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.phases.plan import Stage, StagePlan
from megatron.extensions.phases.schedule import schedule_of


def stage_lines(plan: StagePlan, stage: Stage) -> Iterator[str]:
    """Where a stage of a file begins, how long it is, and what it changes; nothing for a run without stages."""
    if stage.entry is None or stage.end is None:
        return
    training, length = stage.config.training, stage.config.model.seq_length
    ending = min(plan.sizes.iterations(stage.end), plan.iterations)
    yield (
        f"stage {stage.name}: from sample {stage.first_sample:,}, iteration {stage.first_iteration + 1:,}, token "
        f"{stage.first_token:,}: {stage.samples:,} samples of {length:,}, {stage.tokens:,} tokens, "
        f"{ending - stage.first_iteration:,} iterations; global batch {training.global_batch_size}, micro-batch "
        f"{training.micro_batch_size}"
    )
    schedule = schedule_of(plan, stage)
    first, last = stage.first_sample, max(stage.first_sample, plan.sizes.samples(max(0, ending - 1)))
    points = sorted({first, first + (last - first) // 2, last})
    shown = ", ".join(f"{schedule.lr_at(point):.4g}" for point in points)
    source = f"its own ({stage.optimizer.lr_decay_style})" if stage.optimizer is not None else "the run's"
    yield f"    learning rate, {source}: {shown} at its beginning, middle and end"
