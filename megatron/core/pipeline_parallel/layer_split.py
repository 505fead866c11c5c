"""Division of the layers among the pipeline stages, so that all stages have nearly equal cost.

The model, the printed plan of a run and the layout planner all use these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.layout import Stage, split_layers
from megatron.core.pipeline_parallel.stage_parameters import layer_tensors, multi_token_tensors
from megatron.core.pipeline_parallel.stages import pipeline_layout


def pipeline_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> list[Stage]:
    """Return the contents of all stages, in order of global stage number. Any number of layers can be divided among any
    number of stages. Because the embedding and the head also take time, the first and the last stage may contain fewer
    layers than other stages. If a flag requests a number of layers that does not fit, the function raises ValueError
    with the name of the flag.
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
    """Return the FLOPs of each stage's forward pass as a multiple of the mean FLOPs of a layer."""
    first_cost, last_cost = end_costs(model)
    last_cost += multi_token_cost(model)
    stages, costs = pipeline_stages(model, parallel), relative_costs(model)
    return [
        sum(costs[number] for number in stage.layers) + first_cost * stage.first + last_cost * stage.last
        for stage in stages
    ]


def end_costs(config: TransformerConfig) -> tuple[float, float]:
    """Return the FLOPs of the embedding and of the head as multiples of the mean FLOPs of a layer. The cost of the
    embedding is 0, because it is a table look-up."""
    layers, head = _layer_costs(config), config.padded_vocab_size * config.hidden_size
    return 0.0, head * config.num_layers / layers if layers else 0.0


def multi_token_cost(config: TransformerConfig) -> float:
    """Return the FLOPs of multi-token prediction as a multiple of the mean FLOPs of a layer. For each prediction depth,
    the model computes a projection, one transformer layer of the same kind as the last layer, and the head."""
    layers, depths = _layer_costs(config), config.mtp_depths
    if not layers or not depths:
        return 0.0
    modules = sum(
        _matrices(tensors.trained, config) + _attention_cost(config, config.num_layers + depth)
        for depth, tensors in enumerate(multi_token_tensors(config))
    )
    return modules * config.num_layers / layers + depths * end_costs(config)[1]


@lru_cache(maxsize=64)
def relative_costs(config: TransformerConfig) -> tuple[float, ...]:
    """Return the FLOPs of each layer as a multiple of the mean FLOPs of a layer. If `config.pattern` is None, every
    layer has two sublayers, and the function returns 1 for all layers."""
    layers, numbers = _layer_costs(config), range(config.num_layers)
    if not layers or config.pattern is None:
        return (1.0,) * config.num_layers
    of_layer = (_matrices(layer_tensors(config, number).trained, config) for number in numbers)
    attention = (_attention_cost(config, number) for number in numbers)
    return tuple((one + other) * len(numbers) / layers for one, other in zip(of_layer, attention, strict=True))


@lru_cache(maxsize=64)
def _layer_costs(config: TransformerConfig) -> float:
    """Return the number of scalar multiplications per token, summed over all layers. Return 0 if there are no
    layers."""
    matrices = sum(_matrices(layer_tensors(config, number).trained, config) for number in range(config.num_layers))
    attention = sum(_attention_cost(config, number) for number in range(config.num_layers))
    return matrices + attention if matrices else 0.0


def _attention_cost(config: TransformerConfig, number: int) -> float:
    """Return the number of scalar multiplications per token for the attention scores of a layer and for the weighted
    sum of the values. The number is averaged over the tokens of a sequence."""
    if not config.layer(number).attends:
        return 0.0
    own = config.of_layer(number)
    return (own.query_projection_size + own.attention_output_size) * config.layer(number).span.mean(config.seq_length)


def _matrices(metas: Sequence[ParamMeta], config: TransformerConfig) -> float:
    """Return the number of elements of the matrices by which each token is multiplied. Only the experts that a token
    selects are counted."""
    matrices = sum(meta.numel for meta in metas if meta.matrix)
    experts = sum(meta.numel for meta in metas if meta.expert)
    if experts and config.num_experts:
        matrices -= experts - experts * config.moe_router_topk // config.moe_choices
    return matrices
