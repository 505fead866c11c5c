"""Predict the cost of device failures for a planned run from the predicted step, the planned memory and the duration of
earlier saves.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.plan.planner.failures.expected import (
    REPAIR_HOURS,
    RESTART_SECONDS,
    SECONDS_PER_DAY,
    AskedFailures,
    Expected,
    failure_lines,
    failure_record,
    measured_save,
    save_cost,
)
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.run_status import recorded_events

if TYPE_CHECKING:
    from megatron.extensions.plan.planner.memory import RankMemory
    from megatron.extensions.plan.planner.time.step_time import StepTime


@dataclass(frozen=True)
class RunOnFailing:
    """Planned run on nodes that fail at a given rate."""

    expected: Expected
    save_interval: int | None
    nodes: int
    repair_hours: float

    @classmethod
    def of(
        cls,
        config: RunConfig,
        dims: ParallelDims,
        memory: Sequence[RankMemory],
        step: StepTime,
        asked: AskedFailures,
    ) -> RunOnFailing:
        """Compute the expected cost of failures for a planned run."""
        known = asked.save_seconds or measured_save(recorded_events(config.checkpoint.save_root))
        # A save contains each rank's weights and states; replicas are written once.
        states = [rank.plan.memory.parameters + rank.plan.memory.optimizer for rank in memory]
        sharded = config.ddp.data_parallel_sharding_strategy != "no_shard"
        writers = step.world_size // (1 if sharded else dims.size("dp") * dims.size("cp"))
        whole = sum(states) * writers // len(states)
        nodes = max(1, step.world_size // step.gpus_per_node)
        background = config.checkpoint.async_save
        save = save_cost(max(states), whole // nodes, step.device.host_gb_per_second, background, known)
        between = SECONDS_PER_DAY / (asked.per_device_day * step.world_size)
        expected = Expected(step.seconds, between, asked.restart_seconds or RESTART_SECONDS, save)
        interval = config.checkpoint.save_interval if config.checkpoint.save else None
        return cls(expected, interval or None, nodes, asked.repair_hours or REPAIR_HOURS)

    @property
    def lines(self) -> Iterator[str]:
        """Return the plan's lines about failures, goodput and spare nodes. The goodput is stated for the best save
        interval and for the configured save interval."""
        return failure_lines(self.expected, self.save_interval, self.nodes, self.repair_hours)

    @property
    def record(self) -> dict[str, object]:
        """Return, as a JSON object, the values that `lines` states. Times are in seconds."""
        return failure_record(self.expected, self.save_interval, self.nodes, self.repair_hours)
