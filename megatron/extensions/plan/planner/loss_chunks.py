"""Choose --loss-chunk-tokens (the chunk size of the output head and the loss) to save memory at almost no cost in
time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.core.config.losses import LOSSES
from megatron.extensions.plan.planner.memory import RankMemory, fullest, gib
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate

if TYPE_CHECKING:
    from megatron.extensions.plan.planner.time.step_time import StepTime

SIZES = 8192, 4096, 2048, 1024
"""Candidate chunk sizes, in tokens. Smaller chunks take longer and seldom save more."""

MOST_COST = 0.01
"""Largest slowdown that a selected chunk size may cause, as a share of the step time."""

LEAST_SAVED = 0.01
"""Smallest memory saving that is worth reporting, as a share of the fullest rank's memory."""


@dataclass(frozen=True)
class ChunkChoice:
    """Configuration with a loss chunk size, and the effect of this size on the plan."""

    config: RunConfig
    step: StepTime
    memory: tuple[RankMemory, ...]
    saved: int
    """Number of bytes by which computing the loss in chunks reduces the memory of the fullest rank."""

    cost: float
    """Increase of the step time, as a share of the step time."""

    @property
    def line(self) -> str:
        """Format the choice as a line of the plan."""
        size = f"--loss-chunk-tokens {self.config.parallel.loss_chunk_tokens}"
        longer = f"{self.cost:.1%} of the step" if self.cost >= 0.0005 else "no time"
        return f"{size} would save {gib(self.saved)} GiB on the fullest rank, and cost {longer}"


def chosen_chunk(
    config: RunConfig,
    world_size: int,
    step: StepTime,
    memory: Sequence[RankMemory],
    step_of: Callable[[RunConfig], StepTime],
    memory_of: Callable[[RunConfig], Sequence[RankMemory]],
) -> ChunkChoice | None:
    """Return the best chunk size. Prefer larger chunks: a smaller size is chosen only if it saves more memory than the
    larger size. The difference must exceed the fraction `LEAST_SAVED` of the fullest rank's memory.

    Only chunk sizes that slow down a step by at most `MOST_COST` are considered. Returns None if the loss cannot be
    chunked, or if none of these sizes saves at least `LEAST_SAVED` of the memory.

    Args:
        config: Configuration without chunks.
        world_size: Number of ranks.
        step: Predicted step of `config`.
        memory: Planned memory of `config`.
        step_of: Function that predicts the step of another configuration.
        memory_of: Function that plans the memory of another configuration.
    """
    own = config.parallel
    tokens = config.training.micro_batch_size * config.model.seq_length // own.context_parallel_size
    if own.loss_chunk_tokens is not None or config.model.loss_func not in LOSSES:
        return None
    best: ChunkChoice | None = None
    whole = fullest(memory).total
    for size in (size for size in SIZES if 2 * size <= tokens):
        chunked = replace(config, parallel=replace(own, loss_chunk_tokens=size))
        if validate(chunked, world_size):
            return None
        timed = step_of(chunked)
        cost = timed.seconds / step.seconds - 1
        if cost > MOST_COST:
            break
        held = tuple(memory_of(chunked))
        saved = whole - fullest(held).total
        if saved >= LEAST_SAVED * whole and (best is None or saved > best.saved + LEAST_SAVED * whole):
            best = ChunkChoice(chunked, timed, held, saved, max(0.0, cost))
    return best
