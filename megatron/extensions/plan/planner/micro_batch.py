"""Micro-batch on one rank: the properties that determine the memory and time of its passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import splits_backward
from megatron.training.config.run_config import RunConfig


@dataclass(frozen=True)
class MicroBatch:
    """Part of a micro-batch that one rank computes, with the settings that affect the memory and the time of its
    computation."""

    model: TransformerConfig
    parallel: ModelParallelConfig
    samples: int
    device: str = "cuda"
    """Device type, "cuda" or "cpu". Norms save different tensors for backward on GPUs and on CPUs."""

    own_positions: bool = False
    """True if position ids are reset within samples (--reset-position-ids)."""

    bf16_sums: bool = False
    """True if gradients are summed in bf16 (--main-grads-dtype)."""

    packs: bool = True
    """True if all attention tiles of a rank are packed into one launch, as in `PlannedGPU`."""

    deterministic: bool = False
    """True if every sum is computed in a fixed order (--deterministic-mode)."""

    @classmethod
    def of(cls, config: RunConfig) -> MicroBatch:
        """Return the micro-batch of a run's configuration."""
        device, samples = "cpu" if config.parallel.cpu else "cuda", config.training.micro_batch_size
        bf16_sums = config.optimizer.gradients_dtype == "bfloat16"
        own = config.restarts_positions, bf16_sums
        return cls(config.model, config.parallel, samples, device, *own, deterministic=config.training.deterministic)


OF_PIPELINE = (
    *("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    *("microbatch_group_size_per_virtual_pipeline_stage", "distributed_backend", "use_tp_pp_dp_mapping"),
    *("data_parallel_size", "num_distributed_optimizer_instances"),
)
"""Configuration fields that do not affect the work that a layer performs for a micro-batch."""


def in_a_layer(batch: MicroBatch) -> MicroBatch:
    """Return the cache key of a layer's measurements. Micro-batches with equal keys do the same work in identical
    layers, regardless of the position of the layers."""
    values = {name: getattr(ModelParallelConfig, name) for name in OF_PIPELINE}
    values["pipeline_schedule"] = "zb-h1" if splits_backward(batch.parallel.schedule) else "1f1b"
    parallel = replace(batch.parallel, **values).without("cuda_graph_impl").without("pipeline_model_parallel_layout")
    return replace(batch, parallel=parallel.with_offloaded_layers(1))
