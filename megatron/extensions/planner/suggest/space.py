"""What --suggest searches: the layouts of a run, and the configuration and the flags of each. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron.core.parallel_dims import ParallelDims
from megatron.core.parts import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.planner.suggest.layouts import (
    OFFLOADING,
    SHARDING,
    Family,
    Layout,
    Pipeline,
    Saving,
    ScheduleKind,
    Space,
)
from megatron.training.config.flags import Flag, field_table, named_value, value_of, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
"""Schedules that are searched, and a run's own. gpipe takes as long as 1f1b, and more memory."""


class SearchedRun:
    """A run whose layout is searched. Everything else of its configuration stays as it is."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        """`config` is resolved; its own layout need not be legal."""
        self.own, self.world_size = config, world_size
        self.given = _as_given(config)

    @cached_property
    def space(self) -> Space:
        """The space of layouts."""
        model, own = self.own.model, self.own.parallel.schedule
        assert self.own.training.global_batch_size is not None, "resolve() fills the global batch size"
        names = [*SCHEDULES, *(() if own in (*SCHEDULES, "gpipe") else (own,))]
        return Space(
            self.world_size,
            model.num_layers,
            model.num_attention_heads,
            model.seq_length,
            self.own.training.global_batch_size,
            tuple(map(_kind, names)),
            model.num_experts,
        )

    def unavoidable(self, problems: Sequence[Problem]) -> list[Problem]:
        """Those of `problems` that the shortest and the longest pipeline of every family have in the same words: what
        no layout changes."""
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
        """The run's own layout, which must be legal, as a searched one. Where it cuts layers, which modules it computes
        again and how much it offloads is left out."""
        model, parallel, ddp = self.own.model, self.own.parallel, self.own.ddp
        place = pipeline_layout(model, parallel)
        samples, again = self.own.training.micro_batch_size, model.recompute_granularity
        sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size
        split = PIPELINE_SCHEDULES.facts(parallel.schedule).splits_backward
        family = Family(*sizes, parallel.expert_tp, samples, again, split)
        pipeline = Pipeline(parallel.schedule, place.pp, place.chunks, place.v_shaped)
        offload = "activations" if parallel.offloaded_layers else OFFLOADING[0]
        offload = "states" if named_value(self.own, "optimizer_cpu_offload") else offload
        sharded = ddp.data_parallel_sharding_strategy if self.own.optimizer.use_distributed_optimizer else "no_shard"
        dp = ParallelDims.from_config(parallel, self.world_size).size("dp")
        return Layout(family, pipeline, dp, Saving(sharded or SHARDING[0], offload))

    def with_layout(self, layout: Layout) -> RunConfig:
        """The resolved configuration of the run in another layout. It need not be legal."""
        family, pipeline, given = layout.family, layout.pipeline, self.given
        experts = given.model.num_experts is not None
        parallel = replace(
            given.parallel,
            tensor_model_parallel_size=family.tp,
            sequence_parallel=family.tp > 1,
            context_parallel_size=family.cp,
            expert_model_parallel_size=family.ep,
            expert_tensor_parallel_size=family.expert_tp if experts else None,
            data_parallel_size=None,
            num_distributed_optimizer_instances=1,
            pipeline_model_parallel_size=pipeline.ranks,
            pipeline_schedule=pipeline.schedule,
            num_virtual_stages_per_pipeline_rank=pipeline.chunks if self._names_stages(pipeline) else None,
            num_layers_per_virtual_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
            microbatch_group_size_per_virtual_pipeline_stage=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
        )
        saving, replicas = layout.saving, layout.dp * family.cp
        ddp = replace(
            given.ddp,
            data_parallel_sharding_strategy=saving.sharding,
            overlap_grad_reduce=saving.sharding == "optim" and replicas > 1,
            overlap_param_gather=saving.sharding != "optim_grads_params" and replicas > 1,
        )
        optimizer = replace(given.optimizer, use_distributed_optimizer=True)
        training = replace(given.training, micro_batch_size=family.micro_batch, num_microbatches=None)
        model = replace(given.model, **self._recomputation(family.recompute))
        config = replace(given, parallel=parallel, ddp=ddp, optimizer=optimizer, training=training, model=model)
        values = {
            "tp_comm_overlap": named_value(given, "tp_comm_overlap") and family.tp > 1,
            IN_TURNS: named_value(given, IN_TURNS) and family.ep > 1,
            "optimizer_cpu_offload": saving.offload == "states",
            "optimizer_offload_fraction": 1.0,
        }
        return resolve(with_named(config, values | self._activation_offload(layout)), self.world_size)

    def _names_stages(self, pipeline: Pipeline) -> bool:
        """Whether a layout says the number of stages per rank: also to win over what the run's own flags say of it."""
        own = self.given.parallel
        stages = (
            own.num_virtual_stages_per_pipeline_rank,
            own.num_layers_per_virtual_pipeline_stage,
            own.pipeline_model_parallel_layout,
        )
        return pipeline.schedule == "interleaved" or any(stages)

    def _activation_offload(self, layout: Layout) -> dict[str, Any]:
        stage = self.own.model.num_layers // (layout.pipeline.ranks * layout.pipeline.chunks)
        offloads = layout.saving.offload == "activations"
        return {"cpu_offloading": offloads, "cpu_offloading_num_layers": max(1, stage - 1) if offloads else 0}

    def _recomputation(self, rung: str) -> dict[str, Any]:
        """Fields of an entry of `RECOMPUTATION`."""
        model = self.own.model
        values: dict[str, Any] = dict.fromkeys(RECOMPUTE_FIELDS) | {"recompute_granularity": "none"}
        if rung == "full":
            values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if rung == "selective":
            modules = {
                "core_attn": self.own.parallel.attention_backend == "unfused",
                "mla_up_proj": model.attention == "multi_latent_attention",
                "layernorm": True,
                "mlp_act": len(model.moe_layers) < model.num_layers if model.num_experts is not None else True,
                "moe_act": model.num_experts is not None,
            }
            chosen = tuple(name for name, there in modules.items() if there)
            values |= {"recompute_granularity": "selective", "recompute_modules": chosen}
        return values

    def flags(self, config: RunConfig) -> list[str]:
        """Flags that turn the run's own command line into `config`, behind it or in place of its own; those of
        `dropped` must go."""
        found: list[str] = []
        asked = _as_given(config)
        for flag in _searched():
            value, own = value_of(asked, flag), value_of(self.given, flag)
            if value != flag.default or (own != value and value is not None) or flag.field in ALWAYS:
                found += _words(flag, value)
        return found

    def dropped(self, config: RunConfig) -> list[str]:
        """Flags of the run's own command line that have no place beside `flags`."""
        asked = _as_given(config)
        pairs = ((flag, value_of(asked, flag), value_of(self.given, flag)) for flag in _searched())
        return [flag.name for flag, value, own in pairs if value is None and own is not None]


RECOMPUTE_FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")

IN_TURNS = "overlap_moe_expert_parallel_comm"

SEARCHED = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "tp_comm_overlap",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    IN_TURNS,
    "data_parallel_size",
    "num_distributed_optimizer_instances",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "micro_batch_size",
    "num_microbatches",
    "global_batch_size",
    *RECOMPUTE_FIELDS,
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "optimizer_cpu_offload",
)
"""Fields that a layout sets, as far as their extensions are installed."""

ALWAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size")
"""Fields that are shown at their defaults too."""


def _searched() -> Iterator[Flag]:
    yield from (field_table()[field] for field in SEARCHED if field in field_table())


def _words(flag: Flag, value: Any) -> list[str]:
    """A flag and its value as words of a command line."""
    if flag.kind is bool:
        return [next(spelling for spelling, on in flag.spellings() if on is value)]
    return [flag.name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def _as_given(config: RunConfig) -> RunConfig:
    """A configuration with what its layout says as it was before `resolve`, but for the global batch size, which
    another layout must not change."""
    before = {field: value for field, value in config.given if field in SEARCHED and field != "global_batch_size"}
    return replace(with_named(config, before), given=())


def _kind(name: str) -> ScheduleKind:
    facts = PIPELINE_SCHEDULES.facts(name)
    return ScheduleKind(name, 0 if facts.any_chunks else facts.chunks, facts.v_shaped, facts.splits_backward)
