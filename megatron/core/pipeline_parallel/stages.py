"""Contents of each pipeline stage of a configuration.

One answer for the model that is built, the plan that is printed and the planner. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.layout import (
    PipelineLayout,
    end_costs,
    multi_token_cost,
    relative_costs,
    split_layers,
)
from megatron.core.pipeline_parallel.schedules import layout_of


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline stage: its layers by global number, the embedding (first), norm and head (last), and
    with the head the modules of multi-token prediction."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True


def whole_model(config: TransformerConfig) -> Stage:
    """The one stage of a model without pipeline parallelism."""
    return Stage(range(config.num_layers))


def pipeline_layout(model: TransformerConfig, parallel: ModelParallelConfig) -> PipelineLayout:
    """Placement of the stages on ranks. Raises ValueError if the schedule does not take that many stages on a rank, or
    if stages given by hand do not fit."""
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    split = parallel.stage_split
    if split is not None and (stages := split.num_stages(model, parallel)) is not None:
        return layout_of(parallel.schedule, pp, stages // pp)
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if chunks is None and per_stage is not None:
        chunks = max(1, -(-model.num_layers // (per_stage * pp)))
    return layout_of(parallel.schedule, pp, chunks)


def pipeline_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> list[Stage]:
    """Contents of every stage, by global stage number: any number of layers on any number of stages.

    The first and the last stage hold fewer layers, by what the embedding and the head cost. Raises ValueError,
    naming the flag, if a number of layers is asked for that does not fit.
    """
    layout, split = pipeline_layout(model, parallel), parallel.stage_split
    (first_cost, last_cost), fixed = end_costs(model), None
    if split is not None:
        first_cost, last_cost = split.end_costs(parallel, first_cost, last_cost)
        fixed = split.fixed(model, parallel, layout)
    last_cost += multi_token_cost(model)
    layers = split_layers(
        model.num_layers, layout.num_stages, first_cost, last_cost, fixed=fixed, rank_of=layout.rank_of
    )
    last = layout.num_stages - 1
    return [Stage(part, first=stage == 0, last=stage == last) for stage, part in enumerate(layers)]


def stage_costs(model: TransformerConfig, parallel: ModelParallelConfig) -> list[float]:
    """The forward of each stage, in layers of the mean, by FLOPs."""
    first_cost, last_cost = end_costs(model)
    last_cost += multi_token_cost(model)
    stages, costs = pipeline_stages(model, parallel), relative_costs(model)
    return [
        sum(costs[number] for number in stage.layers) + first_cost * stage.first + last_cost * stage.last
        for stage in stages
    ]


def tied_stages(model: TransformerConfig, layout: PipelineLayout) -> tuple[int, ...]:
    """The stages that hold a copy each of the embedding, if it is tied or multi-token prediction reads it: the first
    and the last, unless one rank has both, which then share one."""
    ends = (0, layout.num_stages - 1)
    both = model.tied_embeddings or model.mtp_depths > 0
    return ends if both and layout.rank_of(ends[0]) != layout.rank_of(ends[1]) else ()
