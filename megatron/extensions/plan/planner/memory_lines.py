"""Format the memory section of a plan: what each pipeline rank holds, which items are counted, and whether the total
fits the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.config.param_groups import lines_of_groups
from megatron.core.models.gpt.multi_token import MULTI_TOKEN
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layout import Stage
from megatron.extensions.plan.planner.device_file import DeviceFile
from megatron.extensions.plan.planner.memory import (
    DEVICE,
    DISK,
    GIB,
    RankMemory,
    RankStates,
    dtype_of_states,
    fullest,
    gib,
    place_of_units,
    states_of_callbacks,
)
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.training.config.batch_size import byte_text, formats_of_states
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS
from megatron.training.step_parts import STEP_PARTS, late_update

if TYPE_CHECKING:
    from megatron.extensions.plan.planner.activations import RankActivations
    from megatron.extensions.plan.planner.micro_batch import MicroBatch

RANKS_SHOWN = 8
"""Maximum number of ranks listed on one line."""


def memory_lines(config: RunConfig, dims: ParallelDims, ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yield one line per pipeline rank, followed by lines that explain the sizes. The line of a rank states its layers
    and the bytes of parameters, gradients, optimizer state and activations."""
    from megatron.extensions.plan.planner.micro_batch import MicroBatch

    plans, activations = [rank.plan for rank in ranks], [rank.activations for rank in ranks]
    titles = [*ranks[0].sizes, "total"]
    offloads = any(rank.host for rank in ranks)
    yield "{:<4}{:<44}{:>18}{:>16}".format("pp", "holds", "stage parameters", "rank parameters") + "".join(
        f"{title:>12}" for title in ([*titles, "host"] if offloads else titles)
    )
    for rank in ranks:
        plan = rank.plan
        stage = sum(meta.numel for meta in plan.metas)
        every = [*rank.sizes.values(), rank.total, *([rank.host] if offloads else [])]
        shown = "".join(f"{byte_text(size):>12}" for size in every)
        yield f"{plan.pp_rank:<4}{_holdings(plan):<44}{stage:>18,}{plan.parameters:>16,}{shown}"
    owned = "on every rank"
    if config.optimizer.use_distributed_optimizer:
        experts = f" (of experts over {dims.shards(True)})" if config.model.num_experts is not None else ""
        copies = f", in {dims.instances} instances" if dims.instances > 1 else ""
        owned = f"sharded over {dims.shards(False)} ranks{experts}{copies}"
    yield f"states: {formats_of_states(config)} {owned}; padding of buffers included"
    for callback, states in states_of_callbacks(config).items():
        most_kept = max(plan.of_callbacks[callback] for plan in plans)
        place = " in host memory" if CALLBACKS.facts(callback).stored(config).on_host else ""
        kept = f"{', '.join(states)} {dtype_of_states(config, callback)}{place}"
        yield f"states of callback {callback}: {kept} {owned}, at most {most_kept:,} bytes on a rank"
    if (late := late_update(config)) is not None:
        most_copies = max(plan.memory.rollback for plan in plans)
        yield f"{late}: at most {most_copies:,} bytes of optimizer states are {STEP_PARTS.facts(late).kept_name}"
    if offloads:
        most_host = max((plan.memory for plan in plans), key=lambda memory: memory.host)
        yield (
            f"{config.optimizer.host_fraction:g} of optimizer states in host memory, not in the total: at most "
            f"{most_host.host_states:,} bytes of states, {most_host.host_slots:,} that gradients and parameters pass "
            "through"
        )
    yield from _unit_line(config, plans)
    if config.optimizer.has_own_groups:
        trained = {meta.name: meta for plan in plans for meta in plan.metas if not config.optimizer.freezes(meta)}
        groups = {name: (config.optimizer.group_of(meta), meta.numel) for name, meta in trained.items()}
        yield from lines_of_groups(groups)
        for rule in config.optimizer.parameter_rules:
            yield from rule.lines(trained.values())
    yield from _activation_lines(MicroBatch.of(config), activations)
    most = max(ranks, key=lambda rank: rank.total)
    yield (
        f"most on pp {most.plan.pp_rank}: {most.plan.memory.total:,} bytes of states, {most.activations.peak:,} of "
        f"activations, {most.working:,} of working memory"
    )


def _unit_line(config: RunConfig, plans: Sequence[RankStates]) -> Iterator[str]:
    """Yield a line that states where matrices and their gradients are stored between passes. Yield nothing if every
    device keeps unsharded matrices and gradients."""
    if config.ddp.unit_ranks(config.parallel) is None:
        return
    what = "gradients and parameters" if config.ddp.drops_parameters(config.parallel) else "gradients"
    where = "sharded too"
    if (place := place_of_units(config.parallel)) != DEVICE:
        most = max((plan.memory for plan in plans), key=lambda memory: memory.host_parameters)
        where = f"in host memory: at most {most.host_gradients:,} and {most.host_parameters:,} bytes"
        if place == DISK:
            where += f", which with their states are {most.disk:,} bytes in files"
    flying = max((plan.in_flight for plan in plans), key=lambda units: units.total)
    yield (
        f"matrices' {what} {where}; whole units count as working: at most {flying.parameters:,} bytes of "
        f"parameters, {flying.gradients:,} of gradients"
    )


def _activation_lines(batch: MicroBatch, ranks: Sequence[RankActivations]) -> Iterator[str]:
    """Yield lines that state which items count as activations, and how many bytes they take."""
    model = batch.model
    even = ", tokens distributed evenly over the experts" if model.num_experts is not None else ""
    on_gpus = ", and GPU kernels for norms and attention"
    kernels = "" if batch.device == "cpu" else on_gpus
    yield (
        f"activations: saved for backward, measured on fake tensors with CPU kernels{kernels}{even}; "
        "with the logits of the loss, without tokens and labels"
    )
    again = model.recompute_granularity
    if model.recomputed_modules:
        again += f" ({', '.join(model.recomputed_modules)})"
    flight = "; ".join(
        f"pp {rank} " + " + ".join(f"{n} of chunk {c}" if len(held.in_flight) > 1 else str(n) for c, n in numbered)
        for rank, held in enumerate(ranks[:RANKS_SHOWN])
        for numbered in [list(enumerate(held.in_flight))]
    )
    first = ranks[0].stages[0]
    kept = f"the first stage saves {first.kept:,} bytes for a micro-batch of {batch.samples}, recomputation {again}"
    if offloaded := batch.parallel.offloaded_layers:
        kept += f"; {first.offloaded:,} of {offloaded} layers are offloaded"
    yield kept
    if offloaded:
        yield "on host: pinned power-of-two buffers for offloaded activations; at most two layers stay on the device"
    yield f"micro-batches in flight at the peak: {flight}{' ...' if len(ranks) > RANKS_SHOWN else ''}"
    yield from _fp8_line(batch)
    yield "working: gradients and temporary tensors at the peak of a step, measured in the same way"


def _fp8_line(batch: MicroBatch) -> Iterator[str]:
    own = batch.parallel.options(Fp8Flags)
    layers = own.layers(batch.model.num_layers)
    if layers:
        experts = " (in experts, the two products of tokens)" if batch.model.num_experts is not None else ""
        yield (
            f"fp8: the linear layers of layers {layers[0]}-{layers[-1]} multiply in {own.fp8_format}, scaled "
            f"{own.fp8_recipe}{experts}; two copies of their weights, one byte per element, count as working"
        )


def _holdings(plan: RankStates) -> str:
    """Format stages as `embedding, layers 0-7 (8)` or `layers 24-29 (6), norm, head`; a bar separates several stages of
    a rank."""
    predicts = any(meta.name.startswith(MULTI_TOKEN) for meta in plan.metas)
    return " | ".join(_holding(stage, predicts) for stage in plan.stages)


def _holding(stage: Stage, predicts: bool) -> str:
    parts = ["embedding"] if stage.first else []
    if len(stage.layers):
        first, last = stage.layers[0], stage.layers[-1]
        parts.append(f"layer {first}" if first == last else f"layers {first}-{last} ({len(stage.layers)})")
    parts += ["norm", *(["multi-token"] if predicts else []), "head"] if stage.last else []
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Fit:
    """Comparison of the planned memory with the memory of a device and of its host."""

    memory: Sequence[RankMemory]
    """Memory of each pipeline rank."""

    limit: int | None
    """Memory of the device in bytes; None if unknown."""

    host_limit: int | None = None
    """Host memory for each device in bytes; None if unknown."""

    @classmethod
    def of(cls, memory: Sequence[RankMemory], size: float | None, device: DeviceFile | None) -> Fit:
        """Compare the planned memory with a device of `size` GiB and with the host memory in the device file."""
        host = None if device is None else device.host_memory_gib
        return cls(memory, *(None if each is None else int(each * GIB) for each in (size, host)))

    @property
    def over(self) -> int:
        """Number of bytes by which the plan exceeds the device's memory."""
        return 0 if self.limit is None else max(0, fullest(self.memory).total - self.limit)

    @property
    def over_host(self) -> int:
        """Number of bytes by which the plan exceeds the host's memory."""
        return 0 if self.host_limit is None else max(0, self._most_on_host.host - self.host_limit)

    @property
    def _most_on_host(self) -> RankMemory:
        return max(self.memory, key=lambda rank: rank.host)

    @property
    def lines(self) -> Iterator[str]:
        """Yield lines about the device, if its memory is known, and about the host, if its memory is too small."""
        if self.limit is not None:
            rank = fullest(self.memory)
            where = f"pp {rank.plan.pp_rank} holds most, {gib(rank.total)} of {gib(self.limit)} GiB"
            yield f"does not fit: {where}, {gib(self.over)} too much" if self.over else f"fits: {where}"
        if self.host_limit is not None and self.over_host:
            rank = self._most_on_host
            where = f"pp {rank.plan.pp_rank} keeps most there, {gib(rank.host)} of {self.host_limit / GIB:g} GiB"
            yield f"does not fit the host: {where} (host_memory_gib of the device file), {gib(self.over_host)} too much"

    @property
    def record(self) -> dict[str, object]:
        """Return the comparison as a JSON object; empty if no memory limit is known."""
        if self.limit is None and not self.over_host:
            return {}
        record: dict[str, object] = {"fits": not (self.over or self.over_host)}
        if self.limit is not None:
            record |= {"device_memory": self.limit, "fullest_pp_rank": fullest(self.memory).plan.pp_rank}
            record |= {"bytes_over": self.over}
        if self.over_host:
            record |= {"host_memory": self.host_limit, "host_bytes_over": self.over_host}
        return record
