"""The pipeline stages of a configuration and their placement on ranks. This module does not import torch.

`layer_split` determines which layers each stage holds.
"""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.layout import PipelineLayout, Stage
from megatron.core.pipeline_parallel.schedules import layout_of


def whole_model(config: TransformerConfig) -> Stage:
    """Return the single stage of a model without pipeline parallelism."""
    return Stage(range(config.num_layers))


def pipeline_layout(model: TransformerConfig, parallel: ModelParallelConfig) -> PipelineLayout:
    """Return the placement of stages on ranks.

    Raises ValueError if the schedule does not support the requested number of stages per rank, or if stages that are
    set by hand do not fit the model.
    """
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    split = parallel.stage_split
    if split is not None and (stages := split.num_stages(model, parallel)) is not None:
        return layout_of(parallel.schedule, pp, stages // pp)
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if chunks is None and per_stage is not None:
        chunks = max(1, -(-model.num_layers // (per_stage * pp)))
    return layout_of(parallel.schedule, pp, chunks)


def tied_stages(model: TransformerConfig, layout: PipelineLayout) -> tuple[int, ...]:
    """Return the stages that each hold a copy of the embedding, if the embedding is tied or used for multi-token
    prediction. If the first and the last stage are on different ranks, each of them holds a copy. If one rank holds
    both the first and the last stage, the two stages share one copy, and the result is empty.
    """
    ends = (0, layout.num_stages - 1)
    both = model.tied_embeddings or model.mtp_depths > 0
    return ends if both and layout.rank_of(ends[0]) != layout.rank_of(ends[1]) else ()


def has_tied_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> bool:
    """Return whether the embedding is tied and two ranks each hold a copy of it.

    Returns False if the layout is invalid, because other validation rules report invalid layouts.
    """
    try:
        return bool(tied_stages(model, pipeline_layout(model, parallel)))
    except (ArithmeticError, ValueError):
        return False
