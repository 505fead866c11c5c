"""The parameters of a GPT model of built-in parts, as their ParamMetas say. No torch.

`parameter_metas` lists the parameters that a pipeline stage holds, in the order in which the stage builds them; a test
compares it with models that are really built, so that plans count what trains. Each module is built from the same
functions: those of layers are declared beside the layers, those of the model's ends here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.config.model import TransformerConfig
from megatron.core.moe.parameters import expert_metas, latent_projections, router_metas, shared_gate_meta
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.parts import (
    ACTIVATIONS,
    ATTENTIONS,
    LAYERS,
    LINEAR_ATTENTIONS,
    LOSSES,
    MLPS,
    NORMALIZATIONS,
    RESIDUALS,
    ROUTERS,
    router_of,
)
from megatron.core.registry import Registry, imported
from megatron.core.tensor_parallel.parameters import ColumnLinear, metas_of, sequence_partial
from megatron.core.transformer.parameters import (
    mlp_linears,
    model_norm_metas,
    self_attention_metas,
)

FUNCTION: dict[str, Registry[Any, Any]] = {
    "normalization": NORMALIZATIONS,
    "activation": ACTIVATIONS,
    "attention": ATTENTIONS,
    "mlp_module": MLPS,
    "layer_module": LAYERS,
}
"""Name in the configuration -> the kind of part. With linear attentions these make up the function from tokens to
logits."""


EMBEDDING_NORM = "embedding.layernorm"
"""The norm of word embeddings under --embed-layernorm."""


def extension_parts(config: TransformerConfig) -> list[str]:
    """The parts of a model's function that no other format can express, each as `--flag name`: those that a user's
    extensions register, and those whose parameters are listed nowhere. A loss is none of them."""
    return [
        f"{registry.flag} {name}"
        for registry, name in _parts_of(config)
        if not (registry.built_in(name) and registry.facts(name).parameters)
    ]


def is_declared(config: TransformerConfig) -> bool:
    """Whether `parameter_metas` lists all parameters that are trained, those of a loss included: whether each part of
    the model states where its parameters are listed. Where a part is registered does not count."""
    parts = [*_parts_of(config), (LOSSES, config.loss_func)]
    return all(registry.facts(name).parameters for registry, name in parts)


def _parts_of(config: TransformerConfig) -> list[tuple[Registry[Any, Any], str]]:
    """Registry and name of each part of a model's function."""
    named = [(registry, getattr(config, field)) for field, registry in FUNCTION.items()]
    named += [(LINEAR_ATTENTIONS, name) for name in config.linear_attentions]
    named += [(RESIDUALS, name) for name in RESIDUALS.wanted(config)]
    kinds = (*config.layers, *config.mtp_layers)
    routers = (router_of(config, number) for number, kind in enumerate(kinds) if kind.experts)
    named += [(ROUTERS, name) for name in dict.fromkeys(routers)]
    return [(registry, name) for registry, name in named if name is not None]


def parameter_metas(
    config: TransformerConfig,
    layers: Sequence[int] | None = None,
    *,
    first: bool = True,
    last: bool = True,
    sequence_parallel: bool = False,
    tied_stages: tuple[int, ...] = (),
) -> list[ParamMeta]:
    """The parameters of a stage with these layers, by default of the whole model, in the order of `GPTModel`.

    `tied_stages` are the stages on different ranks that each hold the embedding, or the word embeddings, if several do.
    The vocabulary size must be known.
    """
    found: list[ParamMeta] = []
    if holds_embedding(config, first, last):
        found += _embedding(config, sequence_parallel, tied_stages)
    for number in range(config.num_layers) if layers is None else layers:
        found += _layer(f"decoder.layers.{number}", number, config, sequence_parallel)
    if last:
        found += _end("decoder.final_layernorm", config, sequence_parallel)
        if not (config.tied_embeddings and holds_embedding(config, first, last)):
            found.append(output_meta(config, tied_stages))
        found += output_bias_metas(config)
        for depth in range(config.mtp_depths):
            found += multi_token_metas(depth, config, sequence_parallel)
    return found


def holds_embedding(config: TransformerConfig, first: bool, last: bool) -> bool:
    """Whether a stage has the embedding: the first one, and the last one for multi-token prediction."""
    return first or (last and config.mtp_depths > 0)


def _embedding(config: TransformerConfig, sequence_parallel: bool, tied_stages: tuple[int, ...]) -> Iterator[ParamMeta]:
    found = [word_embedding_meta(config, tied_stages)]
    if config.embed_layernorm:
        found += _norm(EMBEDDING_NORM, config.hidden_size, config, sequence_partial(sequence_parallel))
    if config.position_embedding_type == "learned_absolute":
        found.append(position_embedding_meta(config, sequence_parallel))
    yield from (replace(meta, shared_stages=tied_stages) for meta in found) if config.mtp_depths else found


MULTI_TOKEN = "mtp.layers"
"""Modules of multi-token prediction, by depth from 0."""


def multi_token_projection(name: str, config: TransformerConfig) -> ColumnLinear:
    """eh_proj: from the normed embedding and the normed hidden states, side by side, to hidden states."""
    init = Init("normal", config.init_method_std)
    return ColumnLinear(f"{name}.eh_proj", 2 * config.hidden_size, (config.hidden_size,), False, init)


def multi_token_metas(depth: int, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of one module of multi-token prediction: its layer counts on from the model's."""
    name, partial_over = f"{MULTI_TOKEN}.{depth}", sequence_partial(sequence_parallel)
    for norm in ("enorm", "hnorm"):
        yield from _norm(f"{name}.{norm}", config.hidden_size, config, partial_over)
    yield from multi_token_projection(name, config).metas()
    yield from _layer(f"{name}.transformer_layer", config.num_layers + depth, config, sequence_parallel)
    yield from _end(f"{name}.final_layernorm", config, sequence_parallel)


def model_states(config: TransformerConfig) -> list[tuple[ParamMeta, str]]:
    """Buffers of the whole model beside parameters, with the name of the dtype: saved, but not trained."""
    names = [f"decoder.layers.{number}" for number in range(config.num_layers)]
    names += [f"{MULTI_TOKEN}.{depth}.transformer_layer" for depth in range(config.mtp_depths)]
    kinds = (*config.layers, *config.mtp_layers)
    found = (ROUTERS.facts(router_of(config, number)).states for number in range(len(kinds)))
    routers = [each for each in zip(names, kinds, found, strict=True) if each[1].experts]
    return [state for name, _, listed in routers for state in imported(listed)(f"{name}.mlp.router", config)]


def word_embedding_meta(config: TransformerConfig, tied_stages: tuple[int, ...]) -> ParamMeta:
    """The word embeddings, which are the output weight too where they are tied."""
    shared_stages = tied_stages if config.tied_embeddings or config.mtp_depths else ()
    return _vocabulary("embedding.word_embeddings.weight", config, shared_stages, "embedding")


def output_meta(config: TransformerConfig, tied_stages: tuple[int, ...]) -> ParamMeta:
    """The weight of the output layer: a replica of the word embeddings where they are tied."""
    if config.tied_embeddings:
        return word_embedding_meta(config, tied_stages)
    return _vocabulary("output_layer.weight", config, (), "output")


def output_bias_metas(config: TransformerConfig) -> list[ParamMeta]:
    """The bias of the output layer, where it has one."""
    bias = ParamMeta("output_layer.bias", (config.padded_vocab_size,), {"tp": 0}, Init("zeros"))
    return [bias] if config.add_output_layer_bias else []


def _vocabulary(name: str, config: TransformerConfig, shared_stages: tuple[int, ...], role: str) -> ParamMeta:
    std = config.embedding_init_std if role == "embedding" else config.init_method_std
    shape, init = (config.padded_vocab_size, config.hidden_size), Init("normal", std)
    return ParamMeta(name, shape, {"tp": 0}, init, shared_stages=shared_stages, role=role)


def position_embedding_meta(config: TransformerConfig, sequence_parallel: bool) -> ParamMeta:
    """Learned positions, whole on every rank. Under sequence parallelism a rank looks up those of its own tokens."""
    rows = config.max_positions + config.position_offset
    shape, init = (rows, config.hidden_size), Init("normal", config.embedding_init_std)
    partial_over = sequence_partial(sequence_parallel)
    name = "embedding.position_embeddings.weight"
    return ParamMeta(name, shape, init=init, partial_over=partial_over, role="embedding")


def _norm(name: str, size: int, config: TransformerConfig, partial_over: tuple[str, ...]) -> list[ParamMeta]:
    return model_norm_metas(name, size, partial_over, config)


def _end(norm: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters behind the last layer: of the residual stream's end, and the norm of this name."""
    if config.residual is not None and (listed := RESIDUALS.facts(config.residual).end_parameters):
        yield from imported(listed)(norm, config, sequence_parallel)
    if not config.norms_sums:
        yield from _norm(norm, config.hidden_size, config, sequence_partial(sequence_parallel))


def _layer(name: str, number: int, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters, under `name`, of a layer of the kind of layer `number`, as the model's kind of layer lists
    them."""
    listed = LAYERS.facts(config.layer_module).parameters or layer_metas
    yield from imported(listed)(name, number, config, sequence_parallel)


def layer_metas(name: str, number: int, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a `TransformerLayer`, under `name`, of the kind of layer `number`."""
    config = config.of_layer(number)
    partial_over = sequence_partial(sequence_parallel)

    def norm(of: str, present: bool) -> list[ParamMeta]:
        return _norm(f"{name}.{of}", config.hidden_size, config, partial_over) if present else []

    def residual(sublayer: str) -> Any:
        listed = config.residual and RESIDUALS.facts(config.residual).parameters
        return imported(listed)(f"{name}.{sublayer}", config, sequence_parallel) if listed else []

    kind = config.layer(number)
    if kind.mixes:
        yield from norm("input_layernorm", config.norms_inputs)
        attention = imported(config.mixer_facts(number).parameters or self_attention_metas)
        yield from attention(f"{name}.self_attention", config, sequence_parallel)
        yield from norm("post_attention_layernorm", config.norms_outputs)
        yield from residual("self_attention")
    if kind.mlp:
        yield from norm("pre_mlp_layernorm", config.norms_apart)
        yield from _channel_mixer(f"{name}.mlp", number, config, sequence_parallel)
        yield from norm("post_mlp_layernorm", config.norms_outputs)
        yield from residual("mlp")


def _channel_mixer(name: str, number: int, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    if not config.layer(number).experts:
        yield from imported(MLPS.facts(config.mlp_module).parameters or mlp_metas)(name, config, sequence_parallel)
        return
    listed = ROUTERS.facts(router_of(config, number)).parameters or router_metas
    yield from imported(listed)(f"{name}.router", config, sequence_parallel)
    for metas in expert_metas(f"{name}.experts", config):
        yield from metas
    yield from _activation(f"{name}.experts.activation", config)
    yield from metas_of(latent_projections(name, config) or (), sequence_parallel)
    if config.moe_shared_expert_intermediate_size:
        shared = config.moe_shared_expert_intermediate_size
        if config.moe_shared_expert_gate:
            yield shared_gate_meta(f"{name}.shared_experts", config, sequence_parallel)
        yield from _mlp(f"{name}.shared_experts", config, shared, sequence_parallel)
    if config.moe_output_norm:
        yield from _norm(f"{name}.output_layernorm", config.hidden_size, config, sequence_partial(sequence_parallel))


def mlp_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of an `MLP` in a layer without experts."""
    return _mlp(name, config, config.ffn_size, sequence_parallel)


def _mlp(name: str, config: TransformerConfig, ffn: int, sequence_parallel: bool) -> Iterator[ParamMeta]:
    fc1, fc2 = mlp_linears(name, config, ffn)
    return metas_of((fc1, *_activation(f"{name}.activation", config), fc2), sequence_parallel)


def _activation(name: str, config: TransformerConfig) -> list[ParamMeta]:
    listed = ACTIVATIONS.facts(config.activation).parameters
    return [] if listed is None else list(imported(listed)(name, config))
