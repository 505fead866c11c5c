"""Model configuration, which determines a model's parameters and computation. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log, sqrt
from typing import TypeVar

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.layers import (
    RESIDUALS,
    LayerKind,
    LayerPattern,
    Rotation,
    Span,
    Sublayers,
    all_but_last_of_each,
    each,
    last_of_each,
    layer_numbers,
    layer_pattern,
)
from megatron.core.config.mixers import (
    ATTENTION_MODULES,
    MIXERS,
    AttentionFacts,
    HeadWidths,
    MixerFacts,
    attention_facts,
    with_attention,
)
from megatron.core.config.model_fields import RECOMPUTED_PARTS, ModelFields
from megatron.core.param_meta import InitPolicy

T = TypeVar("T")


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TransformerConfig(ModelFields):
    """Model configuration: everything that determines the parameters and the computation."""

    @cached_property
    def attention(self) -> str:
        """Name of the model's attention module."""
        chosen = (name for name in ATTENTION_MODULES if attention_facts(name).chosen_by(self))
        return next(chosen, self.attention_module)

    @property
    def attention_facts(self) -> AttentionFacts:
        """`AttentionFacts` of the attention module, that is, the properties that other mixers do not have."""
        return attention_facts(self.attention)

    @property
    def attention_mixer(self) -> MixerFacts:
        """`MixerFacts` of the attention module, that is, the properties that mixers of all kinds have."""
        return MIXERS.facts(self.attention)

    @property
    def head_widths(self) -> HeadWidths:
        """Widths of the query, key and value heads."""
        if (widths := self.attention_facts.widths) is not None:
            return widths(self)
        key = self.kv_channels or self.hidden_size // max(1, self.num_attention_heads)  # validation rejects 0 heads
        return HeadWidths(key, key, self.value_channels or key)

    @property
    def head_dim(self) -> int:
        """Number of channels in a query or key head."""
        return self.head_widths.key

    @property
    def value_head_dim(self) -> int:
        """Number of channels in a value head."""
        return self.head_widths.value

    @property
    def head_counts(self) -> tuple[int, int, int, int]:
        """Numbers of query, output-gate, key and value heads that linear_qkv computes for each query group."""
        queries, gated = self.queries_per_group, self.attention_output_gate or self.head_wise_attn_gate
        return queries, queries if gated else 0, 1, 1

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Numbers of query, output-gate, key and value rows in linear_qkv per query group. With --head-wise-attn-gate,
        the output gate of a head is one row."""
        key, value = self.head_dim, self.value_head_dim
        widths = key, 1 if self.head_wise_attn_gate else value, key, value
        return tuple(count * width for count, width in zip(self.head_counts, widths, strict=True))

    @property
    def has_even_heads(self) -> bool:
        """True if the heads of queries, gates, keys and values all have the same width."""
        return self.group_rows == tuple(count * self.head_dim for count in self.head_counts)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads; without GQA, the number of query heads."""
        if self.group_query_attention and self.num_query_groups:
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return max(8 * self.hidden_size // 192, 1) * 64 if self.gated else 4 * self.hidden_size

    def layer(self, number: int) -> LayerKind:
        """Return the kind of layer `number`, or of MTP module `number - num_layers`. The method raises ValueError for
        invalid patterns."""
        return self._kinds[number]

    def of_layer(self, number: int) -> TransformerConfig:
        """Return the configuration of layer `number`: this configuration with the field values of the layer."""
        own = self.layer(number).own
        change: Callable[..., TransformerConfig] = replace
        return change(self, **dict(own)) if own else self

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order of layer number. An invalid layer pattern raises ValueError."""
        return self._kinds[: self.num_layers]

    @property
    def mtp_layers(self) -> tuple[LayerKind, ...]:
        """Layer kind of each multi-token prediction module. An invalid layer pattern raises ValueError."""
        return self._kinds[self.num_layers :]

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return _layer_kinds(self)

    @property
    def _sublayers(self) -> tuple[Sublayers, ...]:
        """Sublayers of each layer and MTP module. By default, MTP modules have the same sublayers as the last layer."""
        if (stated := self.stated_layers) is not None:
            return stated
        variant = self.experimental_attention_variant
        patterns = zip(self.expert_pattern, self.linear_pattern, strict=True)
        found = tuple(with_attention(variant if linear else None, True, experts) for experts, linear in patterns)
        return self._with_last_repeated(found)

    def _with_last_repeated(self, of_layers: tuple[T, ...]) -> tuple[T, ...]:
        """Append the last layer's value once for each multi-token prediction module."""
        return of_layers + of_layers[-1:] * self.mtp_depths

    def _by_own_numbers(self, of_layers: tuple[bool, ...]) -> tuple[bool, ...]:
        """Append the value of each multi-token prediction module to the values of the layers. With --mtp-layer-kind
        own_number, module k has the value of layer k; otherwise, all modules have the value of the last layer."""
        if not of_layers or self.mtp_layer_kind != "own_number":
            return self._with_last_repeated(of_layers)
        return of_layers + tuple(of_layers[number % len(of_layers)] for number in range(self.mtp_depths))

    def _kind(self, parts: Sublayers, local: bool, rotated: bool, ffn: int) -> LayerKind:
        """Return the kind of a layer that has the sublayers `parts`, and whose MLP has the width `ffn`. `local` is True
        if attention has a sliding window or chunks, and `rotated` is True if it has a rotary embedding."""
        has_own_width = parts.mlp and not parts.experts and ffn != self.ffn_size
        width: tuple[tuple[str, object], ...] = (("ffn_hidden_size", ffn),) if has_own_width else ()
        if not parts.attends:
            return LayerKind(**vars(parts), own=width)
        rotation = self.local_rotation if local else self.rotation
        in_all_layers = self.attention_temperature_everywhere
        return LayerKind(
            **vars(parts),
            span=self.local_span if local else Span(),
            rotation=rotation if rotated else None,
            own=(*(self.local_own if local else ()), *width),
            tempered=self.attention_temperature_coeff > 0 and (in_all_layers or not rotated),
        )

    @property
    def pattern(self) -> LayerPattern | None:
        """Layer pattern that specifies the sublayers of each layer; None if each layer has a mixer and an MLP."""
        patterns = (options for options in self.extension_options if isinstance(options, LayerPattern))
        return next((options for options in patterns if options.states_layers), None)

    @property
    def stated_layers(self) -> tuple[Sublayers, ...] | None:
        """Sublayers that the layer pattern specifies for each layer and multi-token prediction module; None without a
        pattern. An invalid pattern raises ValueError."""
        return None if self.pattern is None else self.pattern.stated_layers(self)

    @property
    def linear_attentions(self) -> tuple[str, ...]:
        """Names of the mixers that replace attention in some layers, and of the mixers that these mixers include. An
        invalid pattern raises ValueError."""
        stated = self.stated_layers
        names = [self.experimental_attention_variant] if stated is None else [parts.linear for parts in stated]
        return tuple(dict.fromkeys(part for n in names if n for part in (n, *MIXERS.facts(n).includes)))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a dense MLP. An invalid layer pattern raises ValueError."""
        return tuple(number for number, kind in enumerate(self.layers) if kind.mlp and not kind.experts)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with a mixture of experts. An invalid --moe-layer-freq raises ValueError."""
        return tuple(number for number, moe in enumerate(self.expert_pattern) if moe)

    @property
    def expert_pattern(self) -> tuple[bool, ...]:
        """Tuple with one bool per layer: True if the layer's MLP is a mixture of experts."""
        if (stated := self.stated_layers) is not None:
            return tuple(parts.experts for parts in stated[: self.num_layers])
        return self._pattern(self.num_experts is not None, self.moe_layer_freq, each)

    @property
    def linear_pattern(self) -> tuple[bool, ...]:
        """Tuple with one bool per layer: True if the layer's attention is linear."""
        if (stated := self.stated_layers) is not None:
            return tuple(parts.linear is not None for parts in stated[: self.num_layers])
        linear = self.experimental_attention_variant is not None
        return self._pattern(linear, self.linear_attention_freq, all_but_last_of_each)

    @property
    def local_pattern(self) -> tuple[bool, ...]:
        """Tuple with one bool per layer: True if the layer's attention has a sliding window or chunks."""
        return self._pattern(self.local_span != Span(), self.window_attn_skip_freq, all_but_last_of_each)

    @property
    def rotary(self) -> bool:
        """True if the model uses a rotary embedding."""
        return self.position_embedding_type == "rope" or self.attention_facts.rotates

    @property
    def rope_pattern(self) -> tuple[bool, ...]:
        """Tuple with one bool per layer: True if the layer rotates queries and keys."""
        skipped = self._pattern(self.rotary and self.no_rope_freq is not None, self.no_rope_freq, last_of_each)
        return tuple(self.rotary and not skips for skips in skipped)

    def unreadable_patterns(self) -> dict[str, str]:
        """Check the layer patterns of features that the model does not use. Return error messages, keyed by field."""
        found = {}
        for name, present in (
            ("moe_layer_freq", self.num_experts is not None),
            ("linear_attention_freq", self.experimental_attention_variant is not None),
            ("window_attn_skip_freq", self.local_span != Span()),
            ("no_rope_freq", self.rotary),
        ):
            if not present and (text := getattr(self, name)) is not None and self.num_layers > 0:
                try:
                    layer_pattern(text, self.num_layers, each)
                except ValueError as error:
                    found[name] = str(error)
        return found

    def _pattern(self, present: bool, text: str | None, of_period: Callable[[int, int], bool]) -> tuple[bool, ...]:
        """Return one bool per layer, as the pattern `text` specifies. If `text` is None, all values are `present`."""
        if not present or text is None:
            return (present,) * self.num_layers
        return layer_pattern(text, self.num_layers, of_period)

    @property
    def local_span(self) -> Span:
        """Tokens that are visible to attention in layers with a sliding window or chunks."""
        return Span(self.window_size, self.attention_chunk_size)

    @property
    def local_rotation(self) -> Rotation:
        """Rotary embedding of the layers with a sliding window or chunks."""
        base, percent = self.window_rotary_base, self.window_rotary_percent or self.rotary_percent
        return Rotation(base or self.rotary_base, base is None, percent, self.window_kv_channels)

    @property
    def rotation(self) -> Rotation:
        """Rotary embedding of the layers without a sliding window or chunks."""
        return Rotation(self.rotary_base, percent=self.rotary_percent)

    @property
    def local_own(self) -> tuple[tuple[str, object], ...]:
        """Pairs (field, value) of the fields that have different values in layers with a sliding window or chunks."""
        own: dict[str, object] = {}
        if self.window_num_attention_heads is not None:
            own = {"num_attention_heads": self.window_num_attention_heads, "kv_channels": self.head_dim}
        if self.window_kv_channels is not None:
            own["kv_channels"] = self.window_kv_channels
        if self.window_num_query_groups is not None:
            own |= {"group_query_attention": True, "num_query_groups": self.window_num_query_groups}
        if self.window_softmax_type is not None:
            own["softmax_type"] = self.window_softmax_type
        return tuple((name, value) for name, value in own.items() if value != getattr(self, name))

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """MLP width of each layer that has an MLP. An invalid --ffn-hidden-size-pattern raises ValueError."""
        if self.ffn_hidden_size_pattern is None:
            return (self.ffn_size,) * self.num_layers
        return layer_numbers(self.ffn_hidden_size_pattern, self.num_layers)

    @property
    def mtp_depths(self) -> int:
        """Number of multi-token prediction depths; 0 if the model has no multi-token prediction."""
        return self.mtp_num_layers or 0

    @property
    def activation(self) -> str:
        """Name of the activation function of MLPs and experts."""
        if self.activation_func is not None:
            return self.activation_func
        gelu = "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu"
        return next(iter(self.activation_flags), gelu)

    @property
    def activation_flags(self) -> tuple[str, ...]:
        """Names of the activation functions that are selected by flags such as --swiglu."""
        given = {"swiglu": self.swiglu, "quick_geglu": self.quick_geglu, "squared_relu": self.squared_relu}
        return tuple(name for name, asked in given.items() if asked)

    @property
    def gated(self) -> bool:
        """True if the activation function is gated, so that the first linear layer of an MLP computes two values (gate
        and up) per channel of the MLP."""
        return ACTIVATIONS.facts(self.activation).gated

    @cached_property
    def residual(self) -> str | None:
        """Name of the registered residual stream; None for the plain sum of hidden states and sublayer outputs."""
        return RESIDUALS.chosen(self)

    def has_recomputed(self, part: str) -> bool:
        """Return True if the model contains `part`, a choice of --recompute-modules."""
        if part in ("moe", "moe_act"):
            return self.num_experts is not None
        if part == "shared_experts":
            return bool(self.moe_shared_expert_intermediate_size)
        if part not in RECOMPUTED_PARTS.stated():
            return True
        own = [self.attention_mixer.recomputed]
        own += [] if self.residual is None else [RESIDUALS.facts(self.residual).recomputed]
        return part in own

    @property
    def residual_size(self) -> int:
        """Width of the residual stream between layers, in channels."""
        return self.hidden_size if (name := self.residual) is None else RESIDUALS.facts(name).width(self)

    @property
    def rotary_dim(self) -> int:
        """Number of channels of each query or key head that the rotary embedding rotates."""
        return self.rotated_channels(self.rotation)

    def rotated_channels(self, rotation: Rotation) -> int:
        """Return the number of channels of each query or key head that `rotation` rotates."""
        return int((rotation.channels or self.head_widths.rotary) * rotation.percent)

    @property
    def rotary_type(self) -> str:
        """Kind of rotary frequencies that --rope-type or the attention module selects."""
        return self.rope_type or self.attention_facts.rope_type

    @property
    def yarn(self) -> bool:
        """True if YaRN scales the rotary frequencies."""
        return self.rotary_type == "yarn"

    def yarn_mscale(self, mscale: float) -> float:
        """Return YaRN's scale factor for queries and keys, which keeps attention weights sharp at longer contexts
        (arXiv 2309.00071, section 3.4). `mscale` is a coefficient such as --mscale (DeepSeek)."""
        longer = self.yarn and self.rotary_scaling_factor > 1
        return 0.1 * mscale * log(self.rotary_scaling_factor) + 1 if longer else 1.0

    @property
    def rotary_mscale(self) -> float:
        """Factor by which YaRN scales the rotated channels of queries and keys."""
        return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)

    @property
    def queries_per_group(self) -> int:
        return self.num_attention_heads // self.query_groups

    @property
    def query_projection_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def attention_output_size(self) -> int:
        """Input width of the output projection of attention: the value channels of all query heads together."""
        return self.num_attention_heads * self.value_head_dim

    @property
    def moe_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_io_size(self) -> int:
        """Width of the input and the output of each expert."""
        return self.moe_latent_size or self.hidden_size

    @property
    def attention_scale(self) -> float:
        """Factor by which attention scores are multiplied."""
        of_channels = self.yarn_mscale(self.mscale_all_dim) ** 2 if self.attention_facts.scales_scores else 1.0
        return self.softmax_scale if self.softmax_scale is not None else of_channels / sqrt(self.head_dim)

    @property
    def attends_in_tiles(self) -> bool:
        """True if only tile kernels can compute attention: the model uses ALiBi, attention sinks or a score cap."""
        return self.alibi or self.softmax_type != "vanilla" or self.attn_logit_softcapping is not None

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the word embedding, which is the same under every parallel layout."""
        assert self.vocab_size, "the vocabulary size is known once the tokenizer is"
        return self.pad_vocab_size_to or round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    @property
    def embedding_init_std(self) -> float:
        """Standard deviation of initial embeddings."""
        return self.initial.embedding_std

    @property
    def initial(self) -> InitPolicy:
        """Policy for the initial values of parameters, by role. Weights whose output is added to the residual stream
        have a smaller standard deviation, so that the variance of the stream does not grow with depth."""
        of_layer = 2 if self.pattern is None else 1
        std, of_embeddings = self.init_method_std, self.embedding_init_method_std
        return InitPolicy(
            std=std,
            residual_std=std / sqrt(of_layer * max(self.num_layers, 1)),
            embedding_std=std if of_embeddings is None else of_embeddings,
            norm_weight=0.0 if self.apply_layernorm_1p else 1.0,
        )


@lru_cache(maxsize=64)
def _layer_kinds(model: TransformerConfig) -> tuple[LayerKind, ...]:
    """Return the kinds of all layers and multi-token prediction modules. The results are cached."""
    columns = (
        model._sublayers,
        model._by_own_numbers(model.local_pattern),
        model._by_own_numbers(model.rope_pattern),
        model._with_last_repeated(model.ffn_sizes),
    )
    kinds = [model._kind(*row) for row in zip(*columns, strict=True)]
    for number, kind in enumerate(kinds):
        if kind.linear is not None:
            kinds[number] = MIXERS.facts(kind.linear).of_layer(model, number, kind)
    return tuple(kinds)
