"""Metadata of the parameters of a model and its pipeline stages. The metadata is read from modules that are built on
the meta device.

Memory planning, checkpoints and checkpoint conversion use this module. The parameters of a layer are determined by its
constructor, so an extension that adds a layer need not declare them anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stages import whole_model
from megatron.core.torch_private import no_function_modes


class Tensors(NamedTuple):
    """Metadata of the tensors of one part of the model, such as a layer."""

    trained: tuple[ParamMeta, ...]

    states: tuple[tuple[ParamMeta, str], ...]
    """Metadata of the tensors that are saved in checkpoints but not trained, such as expert biases. Each entry also
    contains the name of the tensor's dtype."""


def stage_metas(
    config: TransformerConfig,
    stage: Stage | None = None,
    *,
    sequence_parallel: bool = False,
    tied_stages: tuple[int, ...] = (),
) -> list[ParamMeta]:
    """Return the metadata of a stage's trained parameters, in the order of `GPTModel.parameters()`. `config` must
    contain the vocabulary size.

    Args:
        config: The model.
        stage: Stage of the model. None means the whole model.
        sequence_parallel: Whether sequence parallelism is used.
        tied_stages: Stages on different ranks that each hold a copy of the embedding.
    """
    stage = stage or whole_model(config)
    found = list(_begin(config, stage, sequence_parallel, tied_stages).trained)
    for number in stage.layers:
        found += layer_tensors(config, number, sequence_parallel).trained
    return found + list(_end(config, stage, sequence_parallel, tied_stages).trained)


def model_states(config: TransformerConfig) -> list[tuple[ParamMeta, str]]:
    """Return the metadata and the dtype name of each tensor of the model that is saved in checkpoints but not trained,
    such as expert biases."""
    stage = whole_model(config)
    found = list(_begin(config, stage, False, ()).states)
    for number in stage.layers:
        found += layer_tensors(config, number, False).states
    return found + list(_end(config, stage, False, ()).states)


def layer_tensors(config: TransformerConfig, number: int, sequence_parallel: bool = False) -> Tensors:
    """Return the metadata of the tensors of layer `number`."""
    return _layers(config, sequence_parallel)[number]


@lru_cache(maxsize=256)
def _layers(config: TransformerConfig, sequence_parallel: bool) -> tuple[Tensors, ...]:
    return tuple(_tensors(layer) for layer in built_layers(config, sequence_parallel))


@lru_cache(maxsize=2)
def built_layers(config: TransformerConfig, sequence_parallel: bool) -> tuple[torch.nn.Module, ...]:
    """Return all layers of the model, built on the meta device. The layers are cached, so callers must not modify them.

    Building a single model with all layers is faster than building a model for each layer.
    """
    stage = Stage(tuple(range(config.num_layers)), first=False, last=False)
    return tuple(_built(config, stage, sequence_parallel, ()).decoder.layers)


@lru_cache(maxsize=256)
def multi_token_tensors(config: TransformerConfig) -> tuple[Tensors, ...]:
    """Return the metadata of the tensors of each multi-token prediction module, in order of depth."""
    mtp = _built(config, Stage((), first=False, last=True), False, ()).mtp
    return () if mtp is None else tuple(_tensors(layer) for layer in mtp.layers)


def _begin(config: TransformerConfig, stage: Stage, sequence_parallel: bool, tied_stages: tuple[int, ...]) -> Tensors:
    return _ends(config, stage.first, stage.last, sequence_parallel, tied_stages)[0]


def _end(config: TransformerConfig, stage: Stage, sequence_parallel: bool, tied_stages: tuple[int, ...]) -> Tensors:
    return _ends(config, stage.first, stage.last, sequence_parallel, tied_stages)[1]


@lru_cache(maxsize=256)
def _ends(
    config: TransformerConfig, first: bool, last: bool, sequence_parallel: bool, tied_stages: tuple[int, ...]
) -> tuple[Tensors, Tensors]:
    """Return the metadata of the stage's tensors that precede the layers, and of the tensors that follow the layers."""
    model = _built(config, Stage((), first=first, last=last), sequence_parallel, tied_stages)
    begin = Tensors((), ()) if model.embedding is None else _tensors(model.embedding)
    every = _tensors(model)
    return begin, Tensors(every.trained[len(begin.trained) :], every.states[len(begin.states) :])


def _built(config: TransformerConfig, stage: Stage, sequence_parallel: bool, tied_stages: tuple[int, ...]) -> GPTModel:
    """Build a stage on the meta device. The callers cache the result, so the stage is built without the torch function
    modes that are currently active."""
    parallel = ModelParallelConfig(sequence_parallel=sequence_parallel)
    with no_function_modes(), torch.device("meta"):
        return GPTModel(
            config,
            parallel,
            stage=replace(stage, tied_stages=tied_stages),
            weights=WeightSetup("meta", initialize=False),
        )


def _tensors(module: torch.nn.Module) -> Tensors:
    trained = []
    states = []
    for parameter in module.parameters():
        meta: ParamMeta = parameter.meta  # type: ignore[attr-defined]
        if parameter.requires_grad:
            trained.append(meta)
        else:
            states.append((meta, str(parameter.dtype).removeprefix("torch.")))
    return Tensors(tuple(trained), tuple(states))


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of each component of the model. A tied embedding is counted once."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    """Number of parameters of dense MLPs and shared experts."""
    router: int = 0
    experts: int = 0
    norms: int = 0
    other: int = 0
    """Number of all remaining parameters, such as the projections of multi-token prediction, and parameters of
    extensions whose names match no other component."""
    output_layer: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_parameters(config: TransformerConfig) -> ParameterCount:
    """Count the parameters of the whole model."""
    sums: dict[str, int] = {}
    for meta in stage_metas(config):
        component = _component(meta.name)
        sums[component] = sums.get(component, 0) + meta.numel
    return ParameterCount(**sums)


def active_parameters(config: TransformerConfig) -> int:
    """Return the number of active parameters, that is, the parameters that are used for each token. Only the experts
    that a token selects are counted."""
    count = count_parameters(config)
    if not count.experts or config.num_experts is None:
        return count.total
    return count.total - count.experts + count.experts * config.moe_router_topk // config.moe_choices


def _component(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "output_layer"
    if ".self_attention." in name:
        return "attention"
    for part in ("router", "experts"):
        if f".mlp.{part}." in name:
            return part
    if ".mlp." in name:
        return "mlp"
    return "norms" if "norm" in name else "other"
