"""Number of pipeline stages and their placement on ranks, as a function of the configuration. This module does not
import torch.

The module `layer_split` determines which layers each stage holds.
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
    """Return the placement of the pipeline stages on ranks.

    The function raises ValueError if the schedule does not support the requested number of stages per rank, or if
    manually specified stages do not fit the model.
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
    """Return the numbers of the stages that each hold a copy of the embedding. There are copies only if the embedding
    is tied or used for multi-token prediction, and if the first and the last stage are on different ranks. In this
    case, each of these two stages holds a copy. Otherwise, the result is empty.
    """
    ends = (0, layout.num_stages - 1)
    both = model.tied_embeddings or model.mtp_depths > 0
    return ends if both and layout.rank_of(ends[0]) != layout.rank_of(ends[1]) else ()


def has_tied_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> bool:
    """Return whether the first and the last stage, on different ranks, each hold a copy of the embedding (see
    `tied_stages`).

    The result is False for an invalid layout, because other validation rules report invalid layouts.
    """
    try:
        return bool(tied_stages(model, pipeline_layout(model, parallel)))
    except (ArithmeticError, ValueError):
        return False
