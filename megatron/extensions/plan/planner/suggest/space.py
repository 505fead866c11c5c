"""Layouts that --suggest searches, with their configurations and flags. This module does not import torch.

A layout is legal if validation accepts it. This module only generates sizes that divide the world size and the
dimensions of the model, so validation rejects few layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, splits_backward
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.training.config.flags import Flag, field_table, named_value, value_of, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate

RECOMPUTATION = ("none", "selective", "full")
"""Kinds of recomputation, sorted by how much they recompute."""

SHARDING = ("optim", "optim_grads", "optim_grads_params")
"""Sharding strategies, ZeRO-1 to ZeRO-3. Each strategy takes less memory than the previous one, and at least as much
time."""

OFFLOADING = ("none", "states", "activations")
"""Kinds of offloading: none, optimizer states, or the activations of all layers of a stage except one."""

CHUNKS = (2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of stages per rank that the search tries for schedules that accept any number of stages."""

SCHEDULES = tuple(name for name in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v") if name in PIPELINE_SCHEDULES)
"""Schedules to search, in addition to the run's schedule. gpipe is omitted, because it takes as long as 1f1b and needs
more memory."""


class Family(NamedTuple):
    """Family of layouts whose layers do the same work for each micro-batch, identified by the settings that these
    layouts share. Layouts with tensor parallelism always use sequence parallelism."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    micro_batch: int = 1
    recompute: str = RECOMPUTATION[0]
    split: bool = False
    """True if weight gradients are computed separately, as in zero-bubble schedules."""


class Pipeline(NamedTuple):
    """Pipeline schedule with `chunks` stages on each of `ranks` pipeline ranks."""

    schedule: str = "1f1b"
    ranks: int = 1
    chunks: int = 1
    v_shaped: bool = False


class Saving(NamedTuple):
    """Memory-saving settings of a layout, apart from recomputation: entries of `SHARDING` and `OFFLOADING`."""

    sharding: str = SHARDING[0]
    offload: str = OFFLOADING[0]

    def next(self, replicas: int) -> Iterator[Saving]:
        """Yield settings that combine this setting with one more way of saving memory.

        A step takes at least as long with a yielded setting as with the current setting. A yielded setting is therefore
        worth evaluating only if the current setting does not fit.
        """
        place = SHARDING.index(self.sharding) + 1
        if replicas > 1 and place < len(SHARDING):
            yield Saving(SHARDING[place], self.offload)
        if self.offload == "none":
            yield from (Saving(self.sharding, offload) for offload in OFFLOADING[1:])


class Layout(NamedTuple):
    """Layout of a run, which consists of a `Family`, a `Pipeline`, the data-parallel size `dp`, and a `Saving`."""

    family: Family = Family()
    pipeline: Pipeline = Pipeline()
    dp: int = 1
    saving: Saving = Saving()

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key for layouts of equal time: fewer ranks per model, simpler schedules, less recomputation first."""
        f, p = self.family, self.pipeline
        sizes = f.tp * f.cp * p.ranks, p.ranks, f.tp, f.cp, f.ep, f.expert_tp, p.chunks, f.split, p.schedule
        saving = SHARDING.index(self.saving.sharding), OFFLOADING.index(self.saving.offload)
        return *sizes, f.micro_batch, RECOMPUTATION.index(f.recompute), *saving

    @property
    def shape(self) -> tuple[object, ...]:
        """Key that consists of the parallel sizes and the micro-batch size of a layout.

        Layouts of the same shape differ only in schedule, virtual stages, recomputation, sharding and offloading.
        """
        return self.family._replace(recompute="", split=False), self.pipeline.ranks

    @property
    def replicas(self) -> int:
        """Number of ranks over which the states of dense parameters can be sharded."""
        return self.dp * self.family.cp

    @property
    def place(self) -> PipelineLayout:
        """Placement of the pipeline stages on the pipeline ranks."""
        return PipelineLayout(self.pipeline.ranks, self.pipeline.chunks, self.pipeline.v_shaped)


@dataclass(frozen=True)
class Space:
    """Search space for one model on one cluster."""

    world_size: int
    num_layers: int
    num_attention_heads: int
    seq_length: int
    global_batch_size: int
    schedules: tuple[str, ...]
    """Pipeline schedules that the search tries if there are several pipeline ranks."""

    num_experts: int | None = None
    recompute: tuple[str, ...] = RECOMPUTATION
    most_tp: int = 8
    most_samples: int = 8
    """Maximum number of samples in a micro-batch."""

    fewest_tokens: int = 512
    """Minimum number of tokens on a context-parallel rank."""

    @property
    def tp_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the world size and the number of heads."""
        return [tp for tp in divisors(self.world_size, self.most_tp) if self.num_attention_heads % tp == 0]

    @property
    def micro_batches(self) -> list[int]:
        """Micro-batch sizes that divide the global batch size."""
        return list(divisors(self.global_batch_size, self.most_samples))

    def families(self) -> Iterator[Family]:
        """Yield every family that has at least one layout."""
        splits = sorted({False, *map(splits_backward, self.schedules)})
        for tp in self.tp_sizes:
            for cp in self._context_sizes(self.world_size // tp):
                for ep, expert_tp in self._expert_sizes(tp):
                    for samples in self.micro_batches:
                        for again in self.recompute:
                            for split in splits:
                                family = Family(tp, cp, ep, expert_tp, samples, again, split)
                                if any(self.layouts(family)):
                                    yield family

    def layouts(self, family: Family) -> Iterator[Layout]:
        """Yield the layouts of a family."""
        cluster = self.world_size // (family.tp * family.cp)
        for ranks in divisors(cluster, self.num_layers):
            dp = cluster // ranks
            if self.world_size // ranks % (family.ep * family.expert_tp) == 0 and not (
                self.global_batch_size % (dp * family.micro_batch)
            ):
                for pipeline in self._pipelines(ranks, family.split):
                    yield Layout(family, pipeline, dp)

    def _pipelines(self, ranks: int, split: bool) -> Iterator[Pipeline]:
        if ranks == 1:
            if not split:
                yield Pipeline()
            return
        for name in self.schedules:
            facts = PIPELINE_SCHEDULES.facts(name)
            if facts.splits_backward is split:
                for chunks in (facts.chunks,) if facts.with_chunks is None else CHUNKS:
                    if chunks <= self.num_layers // ranks:
                        yield Pipeline(name, ranks, chunks, facts.v_shaped)

    def _context_sizes(self, ranks: int) -> Iterator[int]:
        for cp in divisors(ranks, self.seq_length // self.fewest_tokens):
            if cp == 1 or self.seq_length % (2 * cp) == 0:
                yield cp

    def _expert_sizes(self, tp: int) -> Iterator[tuple[int, int]]:
        """Yield pairs (expert-parallel size, expert-tensor-parallel size)."""
        if self.num_experts is None:
            yield 1, tp
            return
        for ep in divisors(self.num_experts, self.world_size):
            for expert_tp in sorted({1, tp}):
                if self.world_size % (ep * expert_tp) == 0:
                    yield ep, expert_tp


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of `number` that are at most `most`, in ascending order. The result always includes 1."""
    most = number if most is None else max(1, min(most, number))
    return [size for size in range(1, most + 1) if number % size == 0]


class SearchedRun:
    """Training run whose layout is searched. The rest of the run's configuration stays unchanged."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        """Initialize the run from a resolved `config`, whose layout may be illegal."""
        self.own, self.world_size = config, world_size
        self._flags = [field_table()[field] for field in values_of(config, Layout()) if field in field_table()]
        self.given = self._as_given(config)

    @cached_property
    def space(self) -> Space:
        """Search space of layouts for this run."""
        model, own = self.own.model, self.own.parallel.schedule
        assert self.own.training.global_batch_size is not None, "resolve() fills in the global batch size"
        return Space(
            self.world_size,
            model.num_layers,
            model.num_attention_heads,
            model.seq_length,
            self.own.training.global_batch_size,
            (*SCHEDULES, *(() if own in (*SCHEDULES, "gpipe") else (own,))),
            model.num_experts,
        )

    def unavoidable(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the entries of `problems` that no layout avoids. A problem is considered unavoidable if, in every
        family, it occurs with the same text for the first and the last layout, which have the shortest and the longest
        pipeline."""
        left = list(problems)
        for family in self.space.families():
            if not left:
                break
            layouts = list(self.space.layouts(family))
            for layout in (layouts[0], layouts[-1]):
                found = set(map(str, validate(self.with_layout(layout), self.world_size)))
                left = [problem for problem in left if str(problem) in found]
        return left

    @property
    def own_layout(self) -> Layout:
        """The run's own layout, expressed as a `Layout` of the search space. The layout must be legal.

        The result does not record where the run splits its layers among stages, which modules it recomputes, or how
        much it offloads.
        """
        model = self.own.model
        parallel = self.own.parallel
        ddp = self.own.ddp
        place = pipeline_layout(model, parallel)
        samples, again = self.own.training.micro_batch_size, model.recompute_granularity
        sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size
        family = Family(*sizes, parallel.expert_tp, samples, again, splits_backward(parallel.schedule))
        pipeline = Pipeline(parallel.schedule, place.pp, place.chunks, place.v_shaped)
        offload = "activations" if parallel.offloaded_layers else OFFLOADING[0]
        offload = "states" if named_value(self.own, "optimizer_cpu_offload") else offload
        sharded = ddp.data_parallel_sharding_strategy if self.own.optimizer.use_distributed_optimizer else "no_shard"
        dp = ParallelDims.from_config(parallel, self.world_size).size("dp")
        return Layout(family, pipeline, dp, Saving(sharded or SHARDING[0], offload))

    def with_layout(self, layout: Layout) -> RunConfig:
        """Return the run's resolved configuration with another layout, which need not be legal."""
        return resolve(with_named(self.given, values_of(self.given, layout)), self.world_size)

    def flags(self, config: RunConfig) -> list[str]:
        """Return the flags that change the run's command line so that it describes `config`.

        If the command line already contains one of these flags, the new value replaces the old one. Flags in `dropped`
        must be removed from the command line.
        """
        found: list[str] = []
        for flag, value, own in self._differing(config):
            if value != flag.default or (own != value and value is not None) or flag.field in ALWAYS:
                found += _words(flag, value)
        return found

    def dropped(self, config: RunConfig) -> list[str]:
        """Return the flags on the run's command line that conflict with `flags`."""
        return [flag.name for flag, value, own in self._differing(config) if value is None and own is not None]

    def _differing(self, config: RunConfig) -> list[tuple[Flag, object, object]]:
        """Return (flag, value in `config`, value on the run's command line) for each layout flag."""
        asked = self._as_given(config)
        return [(flag, value_of(asked, flag), value_of(self.given, flag)) for flag in self._flags]

    def _as_given(self, config: RunConfig) -> RunConfig:
        """Return `config` with all layout flags reset to the values that they had before `resolve` filled in defaults.
        The global batch size is not restored, because it must be the same for every layout."""
        fields = {flag.field for flag in self._flags} - {"global_batch_size"}
        before = {field: value for field, value in config.given if field in fields}
        return replace(with_named(config, before), given=())


def values_of(run: RunConfig, layout: Layout) -> Mapping[str, object]:
    """Return all configuration fields that a layout sets, with their values, in flag order."""
    family = layout.family
    pipeline = layout.pipeline
    saving = layout.saving
    own = run.parallel
    by_hand = (
        own.num_virtual_stages_per_pipeline_rank,
        own.num_layers_per_virtual_pipeline_stage,
        named_value(run, "pipeline_model_parallel_layout"),
    )
    # The number of stages is set explicitly to override the run's own flags.
    says_stages = pipeline.schedule == "interleaved" or any(by_hand)
    offloads = saving.offload == "activations"
    of_stage = run.model.num_layers // (pipeline.ranks * pipeline.chunks)
    return {
        "tensor_model_parallel_size": family.tp,
        "sequence_parallel": family.tp > 1,
        "tp_comm_overlap": named_value(run, "tp_comm_overlap") and family.tp > 1,
        "context_parallel_size": family.cp,
        "expert_model_parallel_size": family.ep,
        "expert_tensor_parallel_size": family.expert_tp if run.model.num_experts is not None else None,
        IN_TURNS: named_value(run, IN_TURNS) and family.ep > 1,
        "data_parallel_size": None,
        "num_distributed_optimizer_instances": 1,
        "pipeline_model_parallel_size": pipeline.ranks,
        "pipeline_schedule": pipeline.schedule,
        "num_virtual_stages_per_pipeline_rank": pipeline.chunks if says_stages else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "microbatch_group_size_per_virtual_pipeline_stage": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "cpu_offloading": offloads,
        "cpu_offloading_num_layers": max(1, of_stage - 1) if offloads else 0,
        "micro_batch_size": family.micro_batch,
        "num_microbatches": None,
        "global_batch_size": run.training.global_batch_size,
        "loss_chunk_tokens": own.loss_chunk_tokens,
        **_recomputation(run, family.recompute),
        "data_parallel_sharding_strategy": saving.sharding,
        "overlap_grad_reduce": saving.sharding == "optim" and layout.replicas > 1,
        "overlap_param_gather": saving.sharding != "optim_grads_params" and layout.replicas > 1,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": saving.offload == "states",
        "optimizer_offload_fraction": 1.0,
    }


def _recomputation(run: RunConfig, rung: str) -> dict[str, object]:
    """Return the recomputation fields of a configuration, with their values for an entry of `RECOMPUTATION`."""
    model, full = run.model, rung == "full"
    modules = {
        "core_attn": run.parallel.attention_backend == "unfused",
        "mla_up_proj": model.attention == "multi_latent_attention",
        "mhc": model.residual == "mhc",
        "layernorm": True,
        "mlp_act": bool(model.dense_layers),
        "moe_act": model.num_experts is not None,
    }
    return {
        "recompute_granularity": rung,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        "recompute_modules": tuple(name for name in modules if modules[name]) if rung == "selective" else None,
    }


IN_TURNS = "overlap_moe_expert_parallel_comm"

ALWAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size")
"""Fields whose flags are printed even if they have their default values."""


def _words(flag: Flag, value: object) -> list[str]:
    """Format a flag and its value as command-line words."""
    if flag.kind is bool:
        return [next(spelling for spelling, on in flag.spellings() if on is value)]
    return [flag.name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
