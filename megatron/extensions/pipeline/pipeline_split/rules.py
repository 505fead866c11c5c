"""Flag rules for the manual division of layers among pipeline stages. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.pipeline.pipeline_split.flags import FIRST_LAYERS, LAST_LAYERS, LAYOUT, SplitFlags
from megatron.extensions.pipeline.pipeline_split.layout_text import layers_of_stages
from megatron.extensions.pipeline.pipeline_split.split import StagesByHand
from megatron.training.config.problem import Problem
from megatron.training.config.rules.pipeline import rule_of
from megatron.training.config.run_config import RunConfig


def problems(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, text = c.parallel, c.options(SplitFlags).pipeline_model_parallel_layout
    if c.model.num_layers < 1 or p.pipeline_model_parallel_size < 1:
        return
    if text is not None and (p.num_virtual_stages_per_pipeline_rank or p.num_layers_per_virtual_pipeline_stage):
        # Another flag rule reports that these flags exclude each other.
        return
    try:
        layout = pipeline_layout(c.model, p)
    except ValueError as error:
        if text is not None:
            yield _of_layout(p, text, str(error))
        return
    if text is None:
        yield from _fixed_ends(c, layout)


def _of_layout(p: ModelParallelConfig, text: str, message: str) -> Problem:
    """Convert the error `message` about the layout `text` to a problem. A layout is invalid if it cannot be parsed, if
    its stages do not match the model, or if the schedule does not support the number of stages."""
    if message.startswith(LAYOUT):
        rule, _, remedy = message.removeprefix(f"{LAYOUT} {text}: ").partition("; ")
        return Problem(LAYOUT, text, rule, remedy)
    chunks = len(layers_of_stages(text)) // p.pipeline_model_parallel_size
    rule = f"makes {chunks} stage{'s' if chunks > 1 else ''} per rank, which" + rule_of(message)
    return Problem(LAYOUT, text, rule, "use that number, or --pipeline-schedule interleaved")


def _fixed_ends(c: RunConfig, layout: PipelineLayout) -> Iterator[Problem]:
    p, flags = c.parallel, c.options(SplitFlags)
    try:
        StagesByHand.fixed(c.model, p, layout)
    except ValueError as error:
        flag = FIRST_LAYERS if str(error).startswith(FIRST_LAYERS) else LAST_LAYERS
        first = flag == FIRST_LAYERS
        value = flags.decoder_first_pipeline_num_layers if first else flags.decoder_last_pipeline_num_layers
        yield Problem.of_message(flag, value, str(error))
