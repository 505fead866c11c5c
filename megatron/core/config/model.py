"""The model's configuration: everything that fixes its parameters and what it computes. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt

from megatron.core.config.attention import LOCAL, RotaryConfig, SelfAttentionConfig
from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.layer_kind import LayerKind, Rotation, Span, Sublayers
from megatron.core.config.layers import (
    RecomputeConfig,
    all_but_last_of_each,
    each,
    last_of_each,
    layer_kinds,
    layer_numbers,
    layer_pattern,
)
from megatron.core.config.losses import LOSSES
from megatron.core.config.mixers import (
    ATTENTION_MODULES,
    ATTENTION_VARIANTS,
    MIXERS,
    AttentionFacts,
    HeadWidths,
    MixerFacts,
    attention_facts,
)
from megatron.core.config.moe import MoEConfig
from megatron.core.config.norms import NormConfig
from megatron.core.param_meta import InitPolicy
from megatron.core.parts import ACTIVATIONS, LAYER_PATTERNS, LAYERS, MLPS, RESIDUALS, layers_by_pattern


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TransformerConfig(
    NormConfig,
    MoEConfig,
    RotaryConfig,
    SelfAttentionConfig,
    RecomputeConfig,
    Section,
):
    """The model: everything that fixes its parameters and what it computes."""

    num_layers: int = flag(0, first_run=True)
    """Transformer layers."""

    hidden_size: int = flag(0, first_run=True)
    """Width h of the residual stream."""

    ffn_hidden_size: int | None = flag(None, effective="ffn_size", first_run=True)
    """Width of the MLP; default 4h, with a gated activation function 8h/3 rounded down to a multiple of 64, at least
    64."""

    ffn_hidden_size_pattern: str | None = None
    """Width of the MLP of each layer, as a list for all layers such as "([1024]*4+[2048]*8)"; entries of layers with
    experts have no effect. Default: --ffn-hidden-size for all layers."""

    num_attention_heads: int = flag(0, first_run=True)
    """Query heads."""

    kv_channels: int | None = flag(None, effective="head_dim")
    """Width of one head; default hidden-size / num-attention-heads."""

    group_query_attention: bool = flag(False, effective="query_groups", first_run=True)
    """Share keys and values among groups of query heads (GQA)."""

    num_query_groups: int | None = flag(None, effective="query_groups", first_run=True)
    """Key/value heads under --group-query-attention."""

    seq_length: int = flag(0, training_only=True, first_run=True)
    """Tokens s in a training sample."""

    max_position_embeddings: int | None = flag(None, effective="max_positions")
    """Longest sequence that the model supports; default seq-length."""

    embed_layernorm: bool = False
    """Normalize word embeddings before positions are added, as BLOOM does."""

    scale_word_embeddings: bool = False
    """Multiply word embeddings by the square root of hidden-size, as Gemma does."""

    swiglu: bool = flag(False, effective="activation", first_run=True)
    """Gated MLP with SiLU instead of GeLU."""

    squared_relu: bool = flag(False, effective="activation")
    """Squared ReLU in the MLP instead of GeLU."""

    quick_geglu: bool = False
    """Gated MLP with quick GeLU, x sigmoid(1.702 x), instead of GeLU."""

    glu_linear_offset: float = 0.0
    """Added to the half of a gated MLP's input that is multiplied by the gate; 1 in gpt-oss."""

    activation_func_clamp_value: float | None = None
    """Bound c of a gated MLP's input: gates are at most c, their factors in [-c, c]; 7 in gpt-oss."""

    bias_gelu_fusion: bool = flag(True, effective="activation")
    """GeLU of models with biases is its tanh approximation (gelu_tanh), as Megatron-LM's fused kernel computes it.
    Without this, or without biases, GeLU is exact (gelu)."""

    activation_func: str | None = flag(None, choices=ACTIVATIONS, effective="activation")
    """Activation function of MLPs and experts; default: that of --swiglu, --quick-geglu or --squared-relu, else
    GeLU."""

    attention_module: str = flag("self_attention", choices=ATTENTION_MODULES, effective="attention")
    """Attention sublayer of each layer."""

    experimental_attention_variant: str | None = flag(None, choices=ATTENTION_VARIANTS)
    """Linear attention in the layers of --linear-attention-freq (gated_delta_net is that of Qwen3-Next), or DeepSeek
    sparse attention (dsa). Default: every layer has --attention-module."""

    linear_attention_freq: str | None = flag(
        None, no_effect_without="--experimental-attention-variant", effective="linear_pattern"
    )
    """Layers with linear attention beside layers with --attention-module: N for the latter in layers N - 1, 2N - 1,
    ..., or a list of 1 (linear) and 0 for all layers. Default: every layer has linear attention."""

    mlp_module: str = flag("mlp", choices=MLPS)
    """MLP sublayer of each layer without experts."""

    layer_module: str = flag("transformer_layer", choices=LAYERS)
    """Whole layer: the composition of normalization, attention and MLP."""

    loss_func: str = flag("cross_entropy", choices=LOSSES, training_only=True)
    """Loss of each token; training minimizes the mean over tokens."""

    mtp_num_layers: int | None = flag(None, at_least=0, training_only=True, effective="mtp_depths")
    """Depths N of multi-token prediction (MTP): modules after the last layer that predict N further tokens
    (DeepSeek-V3); default: none."""

    mtp_loss_scaling_factor: float = flag(
        0.1, at_least=0, no_effect_without="--mtp-num-layers", may_change=True, training_only=True
    )
    """Weight of the losses of multi-token prediction: this number times their mean over depths is added to the loss."""

    mtp_layer_kind: str = flag(
        "own_number",
        choices=("own_number", "last_layer"),
        no_effect_without="--mtp-num-layers",
        training_only=True,
        effective="mtp_layers",
    )
    """Window and rotary embedding of the layers of multi-token prediction, if layers differ in them: those of the first
    layers, module k as layer k (own_number, as in Megatron-LM), or of the last layer."""

    z_loss_coeff: float = flag(0.0, training_only=True)
    """Coefficient of the z-loss of the output logits, which is part of the cross entropy (PaLM); 1e-4 is common."""

    embedding_multiplier: float = 1.0
    """Factor of word embeddings (Granite)."""

    residual_multiplier: float = 1.0
    """Factor of each sublayer's output as it is added to the residual stream (Granite)."""

    logits_scaling: float = 1.0
    """Divisor of the output logits (Granite)."""

    final_logit_softcapping: float | None = None
    """Cap c of the output logits z, which become c tanh(z / c) (Gemma 2); default: none."""

    add_bias_linear: bool = flag(True, name="--disable-bias-linear", first_run=True)
    """No bias in the linear layers, those of experts and the router included."""

    add_qkv_bias: bool = False
    """Bias in the query-key-value projection even under --disable-bias-linear."""

    add_attention_output_bias: bool = flag(False, no_effect_without="--disable-bias-linear")
    """Bias in the last projection of attention even under --disable-bias-linear."""

    add_mlp_bias: bool = flag(False, no_effect_without="--disable-bias-linear")
    """Bias in both linear layers of MLPs, shared experts included, even under --disable-bias-linear (GPT-J)."""

    add_output_layer_bias: bool = False
    """Bias in the output layer, which has none otherwise (GPT-J, Phi)."""

    untie_embeddings_and_output_weights: bool = flag(False, first_run=True)
    """Use a separate weight for the output layer instead of sharing the word embedding's."""

    attention_dropout: float = flag(0.1, at_least=0, below=1, training_only=True)
    """Dropout probability of attention weights."""

    hidden_dropout: float = flag(0.1, at_least=0, below=1, training_only=True)
    """Dropout probability of embeddings and of the output of each sublayer."""

    init_method_std: float = flag(0.02, at_least=0, training_only=True)
    """Standard deviation of initial weights; divided by sqrt(2 * num-layers) for output projections, or by
    sqrt(num-layers) where a layer has one sublayer."""

    embedding_init_method_std: float | None = flag(None, training_only=True, effective="embedding_init_std")
    """Standard deviation of initial word and position embeddings; default: init-method-std."""

    vocab_size: int | None = flag(None, first_run=True)
    """Tokens in the vocabulary before padding; default: the tokenizer's."""

    default_vocab_size: int | None = flag(None, at_least=1, without_effect=True)
    """The --vocab-size of a run that names neither one nor a tokenizer, such as a plan of a preset."""

    make_vocab_size_divisible_by: int = flag(128, training_only=True, effective="padded_vocab_size")
    """Pad the vocabulary to a multiple of this, at every layout."""

    pad_vocab_size_to: int | None = flag(None, training_only=True, effective="padded_vocab_size")
    """Pad the vocabulary to this size, instead of a multiple."""

    window_size: int | None = None
    """Sliding-window attention: each token attends to this many tokens, including itself."""

    attention_chunk_size: int | None = flag(None, excludes="--window-size")
    """Chunked attention: documents are cut into chunks of this many tokens, and each token attends to its own chunk
    (Llama 4)."""

    window_attn_skip_freq: str | None = flag(None, no_effect_without=LOCAL)
    """Layers with full attention beside layers with --window-size or --attention-chunk-size: N for layers N - 1,
    2N - 1, ..., or a list of 1 (window) and 0 (full) for all layers. Default: no layer has full attention."""

    @cached_property
    def attention(self) -> str:
        """Name of the attention sublayer."""
        chosen = (name for name in ATTENTION_MODULES if attention_facts(name).chosen_by(self))
        return next(chosen, self.attention_module)

    @property
    def attention_facts(self) -> AttentionFacts:
        """Facts about the attention sublayer, which are those of attentions alone."""
        return attention_facts(self.attention)

    @property
    def attention_mixer(self) -> MixerFacts:
        """Facts about the attention sublayer, which all mixers have."""
        return MIXERS.facts(self.attention)

    @property
    def head_widths(self) -> HeadWidths:
        """Channels of attention heads."""
        if (widths := self.attention_facts.widths) is not None:
            return widths(self)
        key = self.kv_channels or self.hidden_size // self.num_attention_heads
        return HeadWidths(key, key, self.value_channels or key)

    @cached_property
    def residual(self) -> str | None:
        """Name of the residual stream; None for hidden states to which outputs are added."""
        return RESIDUALS.chosen(self)

    @property
    def residual_size(self) -> int:
        """Channels of the residual stream between layers."""
        return self.hidden_size if (name := self.residual) is None else RESIDUALS.facts(name).width(self)

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.head_widths.key

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head."""
        return self.head_widths.value

    @property
    def rotary_dim(self) -> int:
        """Channels of a query or key head that the rotary embedding rotates."""
        return self.rotated_channels(self.rotary_percent)

    def rotated_channels(self, percent: float) -> int:
        """Channels of a query or key head that are this fraction of those with positions."""
        return int(self.head_widths.rotary * percent)

    @property
    def yarn(self) -> bool:
        """Whether YaRN scales the rotary frequencies."""
        return (self.rope_type or self.attention_facts.rope_type) == "yarn"

    def yarn_mscale(self, mscale: float) -> float:
        """YaRN's factor of queries and keys, which makes attention at a longer context as sharp as before
        (arXiv 2309.00071, section 3.4; DeepSeek's with `mscale`)."""
        longer = self.yarn and self.rotary_scaling_factor > 1
        return 0.1 * mscale * log(self.rotary_scaling_factor) + 1 if longer else 1.0

    @property
    def rotary_mscale(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)

    @property
    def query_groups(self) -> int:
        """Key/value heads: the query heads themselves without GQA."""
        if self.group_query_attention and self.num_query_groups:
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def queries_per_group(self) -> int:
        return self.num_attention_heads // self.query_groups

    @property
    def query_projection_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def attention_output_size(self) -> int:
        """Channels of the values of all query heads, from which the output is projected."""
        return self.num_attention_heads * self.value_head_dim

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return max(8 * self.hidden_size // 192, 1) * 64 if self.gated else 4 * self.hidden_size

    def layer(self, number: int) -> LayerKind:
        """Kind of layer `number`; modules of multi-token prediction count on from the layers. ValueError if a pattern
        cannot be read."""
        return self._kinds[number]

    def of_layer(self, number: int) -> TransformerConfig:
        """The configuration by which layer `number` is built: fields have the values that they have there."""
        own = self.layer(number).own
        change: Callable[..., TransformerConfig] = replace
        return change(self, **dict(own)) if own else self

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, by number. ValueError if a pattern of layers cannot be read."""
        return self._kinds[: self.num_layers]

    @property
    def mtp_layers(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers of multi-token prediction. ValueError if a pattern of layers cannot be read."""
        return self._kinds[self.num_layers :]

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return layer_kinds(self)

    @property
    def stated_layers(self) -> tuple[Sublayers, ...] | None:
        """Sublayers of all layers, followed by those of multi-token prediction, where one pattern states them.
        ValueError if it cannot be read."""
        named = layers_by_pattern(self)
        return None if named is None else LAYER_PATTERNS[named](self)

    @property
    def linear_attentions(self) -> tuple[str, ...]:
        """Names of the linear attentions that the model has, and of their parts. ValueError if a pattern of layers
        cannot be read."""
        stated = self.stated_layers
        names = [self.experimental_attention_variant] if stated is None else [parts.linear for parts in stated]
        return tuple(dict.fromkeys(part for n in names if n for part in (n, *MIXERS.facts(n).includes)))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with an MLP that is none of experts, by number. ValueError if a pattern of layers cannot be read."""
        return tuple(number for number, kind in enumerate(self.layers) if kind.mlp and not kind.experts)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a mixture of experts, by number. ValueError if --moe-layer-freq cannot be read."""
        return tuple(number for number, moe in enumerate(self.expert_pattern) if moe)

    @property
    def expert_pattern(self) -> tuple[bool, ...]:
        """By layer, whether its MLP is a mixture of experts."""
        if (stated := self.stated_layers) is not None:
            return tuple(parts.experts for parts in stated[: self.num_layers])
        return self._pattern(self.num_experts is not None, self.moe_layer_freq, each)

    @property
    def linear_pattern(self) -> tuple[bool, ...]:
        """By layer, whether its attention is linear."""
        if (stated := self.stated_layers) is not None:
            return tuple(parts.linear is not None for parts in stated[: self.num_layers])
        linear = self.experimental_attention_variant is not None
        return self._pattern(linear, self.linear_attention_freq, all_but_last_of_each)

    @property
    def local_pattern(self) -> tuple[bool, ...]:
        """By layer, whether its attention has a sliding window or chunks."""
        return self._pattern(self.local_span != Span(), self.window_attn_skip_freq, all_but_last_of_each)

    @property
    def rotary(self) -> bool:
        """Whether there is a rotary embedding."""
        return self.position_embedding_type == "rope" or self.attention_facts.rotates

    @property
    def rope_pattern(self) -> tuple[bool, ...]:
        """By layer, whether its queries and keys are rotated."""
        skipped = self._pattern(self.rotary and self.no_rope_freq is not None, self.no_rope_freq, last_of_each)
        return tuple(self.rotary and not skips for skips in skipped)

    def unreadable_patterns(self) -> dict[str, str]:
        """Field -> error of each pattern of layers that cannot be read, of features that the model does not have."""
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
        """By layer, whether it has a part that is `present` in the model: in all layers, or those of a text."""
        if not present or text is None:
            return (present,) * self.num_layers
        return layer_pattern(text, self.num_layers, of_period)

    @property
    def local_span(self) -> Span:
        """Tokens that attention sees in layers with a sliding window or chunks."""
        return Span(self.window_size, self.attention_chunk_size)

    @property
    def local_rotation(self) -> Rotation:
        """The rotary embedding of layers with a sliding window or chunks."""
        percent = self.window_rotary_percent or self.rotary_percent
        if self.window_rotary_base is None:
            return Rotation(self.rotary_base, percent=percent)
        return Rotation(self.window_rotary_base, scaled=False, percent=percent)

    @property
    def rotation(self) -> Rotation:
        """The rotary embedding of other layers."""
        return Rotation(self.rotary_base, percent=self.rotary_percent)

    @property
    def local_own(self) -> tuple[tuple[str, object], ...]:
        """Fields that have another value in layers with a sliding window or chunks."""
        own: dict[str, object] = {}
        if self.window_num_attention_heads is not None:
            own = {"num_attention_heads": self.window_num_attention_heads, "kv_channels": self.head_dim}
        if self.window_num_query_groups is not None:
            own |= {"group_query_attention": True, "num_query_groups": self.window_num_query_groups}
        if self.window_softmax_type is not None:
            own["softmax_type"] = self.window_softmax_type
        return tuple((name, value) for name, value in own.items() if value != getattr(self, name))

    @property
    def moe_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_io_size(self) -> int:
        """Channels that experts read and write."""
        return self.moe_latent_size or self.hidden_size

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """By layer, the width of its MLP if it has one. ValueError if --ffn-hidden-size-pattern cannot be read."""
        if self.ffn_hidden_size_pattern is None:
            return (self.ffn_size,) * self.num_layers
        return layer_numbers(self.ffn_hidden_size_pattern, self.num_layers)

    @property
    def mtp_depths(self) -> int:
        """Depths of multi-token prediction; 0 without it."""
        return self.mtp_num_layers or 0

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        of_channels = self.yarn_mscale(self.mscale_all_dim) ** 2 if self.attention_facts.scales_scores else 1.0
        return self.softmax_scale if self.softmax_scale is not None else of_channels / sqrt(self.head_dim)

    @property
    def attends_in_tiles(self) -> bool:
        """Whether kernels of tiles compute all attention: biases, sinks or caps of scores, which torch's has not."""
        return self.alibi or self.softmax_type != "vanilla" or self.attn_logit_softcapping is not None

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; independent of the layout."""
        assert self.vocab_size, "the vocabulary size is known once the tokenizer is"
        return self.pad_vocab_size_to or round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    @property
    def tied_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def activation(self) -> str:
        """Name of the activation function."""
        if self.activation_func is not None:
            return self.activation_func
        gelu = "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu"
        return next(iter(self.activation_flags), gelu)

    @property
    def activation_flags(self) -> tuple[str, ...]:
        """The activation functions that a flag of their own names."""
        given = {"swiglu": self.swiglu, "quick_geglu": self.quick_geglu, "squared_relu": self.squared_relu}
        return tuple(name for name, asked in given.items() if asked)

    @property
    def gated(self) -> bool:
        """Whether the first linear layer of an MLP has two outputs, gate and up, for each input of the second one."""
        return ACTIVATIONS.facts(self.activation).gated

    @property
    def initial(self) -> InitPolicy:
        """Initial values of parameters by their roles. Weights whose output is added to the residual stream are
        smaller, so that the stream's variance does not grow with depth."""
        of_layer = 2 if layers_by_pattern(self) is None else 1
        std, of_embeddings = self.init_method_std, self.embedding_init_method_std
        return InitPolicy(
            std=std,
            residual_std=std / sqrt(of_layer * max(self.num_layers, 1)),
            embedding_std=std if of_embeddings is None else of_embeddings,
            gain=0.0 if self.apply_layernorm_1p else 1.0,
        )
