"""Contents of each pipeline stage of a configuration.

One answer for the model that is built, the plan that is printed and the planner. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.config.pipeline_layout import layers_of_stages, multi_token_depths
from megatron.core.pipeline_parallel.layout import PipelineLayout, end_costs, multi_token_cost, split_layers
from megatron.core.pipeline_parallel.schedules import layout_of

FIRST_LAYERS = "--decoder-first-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"
LAST_LAYERS = "--decoder-last-pipeline-num-layers"


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
    text = parallel.pipeline_model_parallel_layout
    if text is not None:
        by_hand = stages_by_hand(model, parallel, text)
        return layout_of(parallel.schedule, pp, len(by_hand) // pp)
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if chunks is None and per_stage is not None:
        chunks = max(1, -(-model.num_layers // (per_stage * pp)))
    return layout_of(parallel.schedule, pp, chunks)


def stages_by_hand(model: TransformerConfig, parallel: ModelParallelConfig, text: str) -> tuple[int, ...]:
    """Layers of each stage in `text`, of --pipeline-model-parallel-layout. Raises ValueError if they do not fit."""
    pp, named = parallel.pipeline_model_parallel_size, f"{LAYOUT} {text}"
    try:
        layers = layers_of_stages(text)
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from None
    if len(layers) % pp:
        rule = f"has {len(layers)} stages, which must be a multiple of --pipeline-model-parallel-size {pp}"
        near = max(1, len(layers) // pp) * pp
        raise ValueError(f"{named}: {rule}; nearest: {near} stages")
    if sum(layers) != model.num_layers:
        rule = f"has {sum(layers)} layers, which must be --num-layers {model.num_layers}"
        raise ValueError(f"{named}: {rule}; add or remove t, or use --num-layers {sum(layers)}")
    depths = multi_token_depths(text)
    if depths != model.mtp_depths:
        rule = f"has m {depths} times, which must be --mtp-num-layers {model.mtp_depths}"
        raise ValueError(f"{named}: {rule}; write {'m' * model.mtp_depths}L for L, or use --mtp-num-layers {depths}")
    return layers


def pipeline_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> list[Stage]:
    """Contents of every stage, by global stage number: any number of layers on any number of stages.

    The first and the last stage hold fewer layers, by what the embedding and the head cost. Raises ValueError,
    naming the flag, if a number of layers is asked for that does not fit.
    """
    layout = pipeline_layout(model, parallel)
    first_cost, last_cost = end_costs(model)
    layers = split_layers(
        model.num_layers,
        layout.num_stages,
        1.0 if parallel.account_for_embedding_in_pipeline_split else first_cost,
        (1.0 if parallel.account_for_loss_in_pipeline_split else last_cost) + multi_token_cost(model),
        fixed=fixed_layers(model, parallel, layout),
        rank_of=layout.rank_of,
    )
    last = layout.num_stages - 1
    return [Stage(part, first=stage == 0, last=stage == last) for stage, part in enumerate(layers)]


def stage_costs(model: TransformerConfig, parallel: ModelParallelConfig) -> list[float]:
    """The forward of each stage, in layers, by FLOPs."""
    first_cost, last_cost = end_costs(model)
    last_cost += multi_token_cost(model)
    stages = pipeline_stages(model, parallel)
    return [len(stage.layers) + first_cost * stage.first + last_cost * stage.last for stage in stages]


def tied_stages(model: TransformerConfig, layout: PipelineLayout) -> tuple[int, ...]:
    """The stages that hold a copy each of the embedding, if it is tied or multi-token prediction reads it: the first
    and the last, unless one rank has both, which then share one."""
    ends = (0, layout.num_stages - 1)
    both = model.tied_embeddings or model.mtp_depths > 0
    return ends if both and layout.rank_of(ends[0]) != layout.rank_of(ends[1]) else ()


def fixed_layers(model: TransformerConfig, parallel: ModelParallelConfig, layout: PipelineLayout) -> dict[int, int]:
    """Stage -> its number of layers, where the flags say it. Raises ValueError if they do not fit the model."""
    if parallel.pipeline_model_parallel_layout is not None:
        return dict(enumerate(stages_by_hand(model, parallel, parallel.pipeline_model_parallel_layout)))
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    _check_fixed(model.num_layers, layout, first, last)
    found: dict[int, int] = {}
    for count, rank, end in ((first, 0, 0), (last, layout.pp - 1, layout.num_stages - 1)):
        if count is not None:
            stages = [end] if layout.v_shaped else layout.stages_of(rank)
            found |= dict(zip(stages, _spread(count, len(stages)), strict=True))
    return found


def _spread(count: int, parts: int) -> Iterator[int]:
    """`count` in `parts` parts as even as possible, the larger ones first."""
    return (count // parts + (part < count % parts) for part in range(parts))


def _check_fixed(num_layers: int, layout: PipelineLayout, first: int | None, last: int | None) -> None:
    given = [(name, n) for name, n in ((FIRST_LAYERS, first), (LAST_LAYERS, last)) if n is not None]
    for name, n in given:
        if not 0 <= n <= num_layers:
            raise ValueError(f"{name} {n}: must be between 0 and --num-layers {num_layers}; nearest: {num_layers}")
    if given and layout.pp == 1 and not layout.v_shaped:
        raise ValueError(f"{given[0][0]} {given[0][1]}: needs more than one pipeline rank; leave it out")
    if first is None or last is None:
        return
    ends_only = (layout.num_stages if layout.v_shaped else layout.pp) == 2
    if first + last > num_layers or (ends_only and first + last != num_layers):
        rule = f"must add up to {'' if ends_only else 'at most '}--num-layers {num_layers}"
        remedy = f"nearest: {first} and {num_layers - first}"
        raise ValueError(f"{FIRST_LAYERS} {first}: and {LAST_LAYERS} {last} {rule}; {remedy}")
