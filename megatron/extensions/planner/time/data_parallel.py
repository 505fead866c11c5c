"""What a step does between the last backward and the next forward: gradients reduced, states updated, parameters
gathered, and what of it is hidden behind passes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.param_layout import unit_of
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parts import param_gather
from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.memory import DTYPE_BYTES, RankStates, local_shape
from megatron.extensions.planner.time.replay import Network, Placement, placement


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step on one rank."""

    grad_reduce: float
    param_gather: float
    optimizer: float


@dataclass(frozen=True)
class DataParallel:
    """One layout's replicas."""

    parallel: ModelParallelConfig
    ddp: DDPConfig
    optimizer: OptimizerConfig
    dims: ParallelDims
    network: Network
    device: DeviceFile

    def exposed(self, states: RankStates, forward: float, backward: float, microbatches: int) -> Exposed:
        """`forward` and `backward` are what the rank computes for one micro-batch."""
        numels = {False: 0, True: 0}
        for meta in states.metas:
            if not self.optimizer.freezes(meta.name):
                numels[meta.expert] += prod(local_shape(meta, self.dims))
        every_batch = self.ddp.shards_gradients
        units = len({unit_of(meta.name) for meta in states.metas})
        reduce = [time for expert, numel in numels.items() for time in self._reductions(numel, expert, units)]
        gather = [time for expert, numel in numels.items() for time in self._gathers(numel, expert, units)]
        overlaps = self.ddp.overlap_grad_reduce or every_batch
        reduced = self._behind(reduce, backward) if overlaps else sum(reduce)
        reduced *= microbatches if every_batch else 1
        if self.ddp.shards_parameters:  # gathered for the forward and again for the backward of every micro-batch
            gathered = microbatches * (self._behind(gather, forward) + self._behind(gather, backward))
        elif self.optimizer.use_distributed_optimizer:
            gathered = self._behind(gather, forward) if self.ddp.overlap_param_gather else sum(gather)
        else:
            gathered = 0.0
        return Exposed(reduced, gathered, self._update(states))

    def least(self, elements: Mapping[bool, float], forward: float, backward: float, microbatches: int) -> float:
        """Seconds that reducing and gathering so many trained parameters, by whether they are experts', adds at least
        to a rank's passes, if those of a micro-batch take `forward` and `backward`, or to longer ones and what they are
        longer. With endless passes all is hidden.

        Of collectives of T seconds behind C of computation at least T - C is exposed, and what is hidden slows the
        computation.
        """
        slowdown = min(1.0, self.device.overlap_slowdown)
        reduce = sum(time for expert, count in elements.items() for time in self._reductions(count, expert, 1))
        gather = sum(time for expert, count in elements.items() for time in self._gathers(count, expert, 1))

        def added(time: float, compute: float) -> float:
            return (1 - slowdown) * max(0.0, time - compute) + slowdown * time

        if self.ddp.shards_parameters:  # a longer backward hides more of a reduction and of a gather
            longer = max(0.0, min(reduce, gather) - backward)
            both = added(reduce, backward + longer) + added(gather, backward + longer)
            return microbatches * (longer + both + added(gather, forward))
        reductions = microbatches if self.ddp.shards_gradients else 1
        return reductions * added(reduce, backward) + added(gather, forward)

    def _behind(self, times: Sequence[float], compute: float) -> float:
        """What is exposed of collectives that follow each other, the operands of each ready after an equal share of the
        computation; what is hidden slows the computation."""
        clock = 0.0
        for number, time in enumerate(times, 1):
            clock = max(clock, compute * number / len(times)) + time
        exposed = max(0.0, clock - compute) if times else 0.0
        return exposed + self.device.overlap_slowdown * max(0.0, sum(times) - exposed)

    def _reductions(self, numel: float, expert: bool, units: int) -> list[float]:
        """Times of the buckets of gradients; of the layers where every micro-batch's gradients are reduced."""
        main = 2 if self.ddp.grad_reduce_in_bf16 or self.optimizer.gradients_dtype == "bfloat16" else None
        size = main or DTYPE_BYTES[self.parallel.main_dtype]
        kind = "reduce_scatter" if self.optimizer.use_distributed_optimizer else "all_reduce"
        return self._buckets(numel, size, expert, kind, units if self.ddp.shards_gradients else 1)

    def _gathers(self, numel: float, expert: bool, units: int) -> list[float]:
        size = DTYPE_BYTES[self.parallel.params_dtype] if param_gather(self.parallel) is None else 1
        return self._buckets(numel, size, expert, "all_gather", units if self.ddp.shards_parameters else 1)

    def _buckets(self, numel: float, size: int, expert: bool, kind: str, least: int) -> list[float]:
        if not numel:
            return []
        within, across = self._groups(expert)
        if within.size * across.size == 1:
            return []
        limit = self.ddp.ddp_bucket_size or max(40_000_000, 1_000_000 * within.size)
        count = max(least, ceil(numel / limit))
        moved = numel * size / count
        time = self.network.seconds(kind, moved, within)
        if across.size > 1 and kind != "all_gather":
            share = moved / within.size if kind == "reduce_scatter" else moved
            time += self.network.seconds("all_reduce", share, across)
        return [time] * count

    def _groups(self, expert: bool) -> tuple[Placement, Placement]:
        """The ranks that shard states, and those at the same place of each instance."""
        axes = ("expt_dp",) if expert else ("dp", "cp")
        whole = placement(self.dims, axes, self.network.ranks_per_node)
        if self.dims.instances == 1:
            return whole, Placement(1, 1)
        size = whole.size // self.dims.instances
        return Placement(size, min(size, whole.in_node), whole.stride), Placement(
            self.dims.instances, max(1, whole.in_node // size), whole.stride * size
        )

    def _update(self, states: RankStates) -> float:
        """Gradients cleared, read for their norm and for the update; states read and written; parameters written."""
        memory = states.memory
        shards = self.dims.shards(False) if self.optimizer.use_distributed_optimizer else 1
        moved = memory.gradients + 2 * memory.gradients / shards + memory.parameters / shards
        moved += 2 * (memory.main_parameters + memory.moments + memory.rollback)
        host = 2 * memory.host_states + 2 * memory.host_slots
        return moved / self.device.copy_tb_per_second / 1e12 + host / self.device.host_gb_per_second / 1e9
