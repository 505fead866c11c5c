"""Computes the number of layers in each pipeline stage from the flags, and validates these flags. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.extensions.pipeline.pipeline_split.flags import FIRST_LAYERS, LAST_LAYERS, LAYOUT, SplitFlags
from megatron.extensions.pipeline.pipeline_split.layout_text import layers_of_stages, multi_token_depths


class StagesByHand:
    """Entry in the registry `STAGE_SPLITS` that implements the flags of this extension."""

    @staticmethod
    def virtual(parallel: ModelParallelConfig) -> bool:
        try:
            layers = layers_of_stages(parallel.options(SplitFlags).pipeline_model_parallel_layout or "")
        except ValueError:
            return False
        return len(layers) > parallel.pipeline_model_parallel_size

    @staticmethod
    def num_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> int | None:
        text = parallel.options(SplitFlags).pipeline_model_parallel_layout
        return None if text is None else len(stages_by_hand(model, parallel, text))

    @staticmethod
    def end_costs(parallel: ModelParallelConfig, first: float, last: float) -> tuple[float, float]:
        flags = parallel.options(SplitFlags)
        return (
            1.0 if flags.account_for_embedding_in_pipeline_split else first,
            1.0 if flags.account_for_loss_in_pipeline_split else last,
        )

    @staticmethod
    def fixed(model: TransformerConfig, parallel: ModelParallelConfig, layout: PipelineLayout) -> dict[int, int]:
        """Return a mapping from stages to the numbers of layers that the flags specify. Stages whose number of layers
        is not specified are omitted. Raise ValueError if the numbers do not fit the model and the pipeline layout."""
        flags = parallel.options(SplitFlags)
        if flags.pipeline_model_parallel_layout is not None:
            return dict(enumerate(stages_by_hand(model, parallel, flags.pipeline_model_parallel_layout)))
        first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
        _check_fixed(model.num_layers, layout, first, last)
        found: dict[int, int] = {}
        for count, rank, end in ((first, 0, 0), (last, layout.pp - 1, layout.num_stages - 1)):
            if count is not None:
                stages = [end] if layout.v_shaped else layout.stages_of(rank)
                found |= dict(zip(stages, _spread(count, len(stages)), strict=True))
        return found


def stages_by_hand(model: TransformerConfig, parallel: ModelParallelConfig, text: str) -> tuple[int, ...]:
    """Return the number of layers in each stage of `text`, the value of --pipeline-model-parallel-layout. Raise
    ValueError if the stages do not fit the model."""
    pp, named = parallel.pipeline_model_parallel_size, f"{LAYOUT} {text}"
    try:
        layers = layers_of_stages(text)
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from None
    if len(layers) % pp:
        rule = f"has {len(layers)} stages, but the number must be a multiple of --pipeline-model-parallel-size {pp}"
        near = max(1, len(layers) // pp) * pp
        raise ValueError(f"{named}: {rule}; nearest: {near} stages")
    if sum(layers) != model.num_layers:
        rule = f"has {sum(layers)} layers, but --num-layers is {model.num_layers}"
        raise ValueError(f"{named}: {rule}; add or remove t, or use --num-layers {sum(layers)}")
    depths = multi_token_depths(text)
    if depths != model.mtp_depths:
        rule = f"has m {depths} times, but --mtp-num-layers is {model.mtp_depths}"
        raise ValueError(f"{named}: {rule}; write {'m' * model.mtp_depths}L for L, or use --mtp-num-layers {depths}")
    return layers


def _spread(count: int, parts: int) -> Iterator[int]:
    """Divide `count` into a sum of `parts` numbers that are as equal as possible. The larger numbers come first."""
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
