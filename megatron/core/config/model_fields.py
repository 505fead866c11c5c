"""Fields of the model configuration. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.attention import LOCAL, RotaryConfig, SelfAttentionConfig
from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.layers import LAYERS, RESIDUALS
from megatron.core.config.losses import LOSSES
from megatron.core.config.mixers import (
    ATTENTION_MODULES,
    ATTENTION_VARIANTS,
    MIXERS,
)
from megatron.core.config.moe import MoEConfig
from megatron.core.config.norms import NormConfig

RECOMPUTED_IN_EVERY_MODEL = ("core_attn", "layernorm", "mlp_act", "mlp")
NEEDED_BY = {
    "moe_act": "--num-experts",
    "moe": "--num-experts",
    "shared_experts": "--moe-shared-expert-intermediate-size",
}
"""Layer parts that only some models have, mapped to the flags that add the parts."""

WITHIN = {"mlp_act": "mlp", "moe_act": "moe", "shared_experts": "moe"}
"""Dictionary that maps a part of a layer to the larger part that contains it."""


class RecomputedParts(Collection[str]):
    """Choices of --recompute-modules: parts that every layer has, and parts that a registered mixer or residual stream
    adds to its layers."""

    @staticmethod
    def stated() -> dict[str, str]:
        """Return the recomputable parts of mixers and residual streams. Each part is mapped to the flag that adds its
        mixer or residual stream to a model."""
        mixers, streams = (MIXERS.facts(name) for name in MIXERS), (RESIDUALS.facts(name) for name in RESIDUALS)
        found = [(facts.recomputed, facts.recomputed_with) for facts in mixers]
        found += [(facts.recomputed, facts.switch) for facts in streams]
        return {part: flag for part, flag in found if part}

    def __iter__(self) -> Iterator[str]:
        return iter((*RECOMPUTED_IN_EVERY_MODEL, *NEEDED_BY, *self.stated()))

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def where(self, part: str) -> str:
        """Return the file and line at which the mixer or residual stream that adds the layer part `part` is registered.
        Return an empty string if no mixer or residual stream adds the part."""
        owners = [MIXERS.where(name) for name in MIXERS if MIXERS.facts(name).recomputed == part]
        owners += [RESIDUALS.where(name) for name in RESIDUALS if RESIDUALS.facts(name).recomputed == part]
        return owners[0] if owners else ""

    def needs(self, part: str) -> str:
        """Return the flag that adds the layer part `part` to a model, or an empty string if every model has this
        part."""
        return (NEEDED_BY | self.stated()).get(part, "")

    def within(self, part: str) -> str | None:
        """Return the larger part of a layer that contains `part`; None if `part` is not contained in a larger part."""
        return WITHIN.get(part)


RECOMPUTED_PARTS = RecomputedParts()


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation recomputation: the backward pass recomputes activations instead of reading saved activations."""

    recompute_granularity: str = flag(
        "none",
        choices=("none", "selective", "full"),
        without_effect=True,
        training_only=True,
        first_run=True,
    )
    """Activation recomputation in the backward pass: nothing (none), parts of each layer (selective) or whole layers
    (full)."""

    recompute_method: str | None = flag(
        None,
        choices=("uniform", "block"),
        no_effect_without="--recompute-granularity full",
        without_effect=True,
        training_only=True,
    )
    """Full recomputation: all layers in groups (uniform), or only the first layers of a stage (block)."""

    recompute_num_layers: int | None = flag(
        None, no_effect_without="--recompute-granularity full", without_effect=True, training_only=True
    )
    """Full recomputation: number of layers in a group (uniform), or number of recomputed layers in each stage
    (block)."""

    recompute_modules: tuple[str, ...] | None = flag(
        None,
        many=True,
        choices=RECOMPUTED_PARTS,
        no_effect_without="--recompute-granularity selective",
        without_effect=True,
        training_only=True,
    )
    """Parts of each layer that selective recomputation recomputes; default: core_attn. core_attn is attention without
    its projections, and layernorm is both norms. In layers without experts, mlp is the whole MLP and mlp_act is its
    activation function. In layers with experts, moe is the whole MoE layer, moe_act is the activation functions of all
    experts, and shared_experts is the shared expert."""

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Parts of each layer that selective recomputation recomputes."""
        return self.recompute_modules or ("core_attn",) if self.recompute_granularity == "selective" else ()

    def recomputes(self, module: str) -> bool:
        """Return True if selective recomputation recomputes `module` separately, and not as a part of a larger module
        that is recomputed."""
        named = self.recomputed_modules
        return module in named and RECOMPUTED_PARTS.within(module) not in named


@dataclass(frozen=True)
class ModelFields(
    NormConfig,
    MoEConfig,
    RotaryConfig,
    SelfAttentionConfig,
    RecomputeConfig,
    Section,
):
    """Flags of the model. `megatron.core.config.model.TransformerConfig` adds the values derived from these flags."""

    num_layers: int = flag(0, first_run=True)
    """Number of transformer layers."""

    hidden_size: int = flag(0, first_run=True)
    """Width h of the residual stream."""

    ffn_hidden_size: int | None = flag(None, effective="ffn_size", first_run=True)
    """Width of the MLP. Default: 4h. With a gated activation function, the default is 8h/3, rounded down to a multiple
    of 64, but at least 64."""

    ffn_hidden_size_pattern: str | None = None
    """Width of the MLP in each layer, as a list with one entry per layer, such as "([1024]*4+[2048]*8)". The entries
    for layers with experts have no effect. Default: --ffn-hidden-size for all layers."""

    num_attention_heads: int = flag(0, first_run=True)
    """Number of query heads."""

    kv_channels: int | None = flag(None, effective="head_dim")
    """Width of one attention head; default: hidden-size / num-attention-heads."""

    group_query_attention: bool = flag(False, effective="query_groups", first_run=True)
    """Share keys and values among groups of query heads (GQA)."""

    num_query_groups: int | None = flag(None, effective="query_groups", first_run=True)
    """Number of key/value heads under --group-query-attention."""

    seq_length: int = flag(0, training_only=True, first_run=True)
    """Number of tokens s in a training sample."""

    max_position_embeddings: int | None = flag(None, effective="max_positions")
    """Length of the longest sequence that the model supports; default: seq-length."""

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
    """Offset added to the linear half of a gated MLP, which the gate multiplies; 1 in gpt-oss."""

    activation_func_clamp_value: float | None = None
    """Bound c for clamping the input of a gated activation function. Gates are clamped to at most c, and the values
    that the gates multiply to [-c, c]. gpt-oss uses 7."""

    bias_gelu_fusion: bool = flag(True, effective="activation")
    """Use the tanh approximation of GeLU (gelu_tanh) in models with biases, as Megatron-LM's fused kernel does.
    Without this flag, or without biases, GeLU is exact (gelu)."""

    activation_func: str | None = flag(None, choices=ACTIVATIONS, effective="activation")
    """Activation function of MLPs and experts; default: set by --swiglu, --quick-geglu or --squared-relu, otherwise
    GeLU."""

    attention_module: str = flag("self_attention", choices=ATTENTION_MODULES, effective="attention")
    """Attention sublayer of each layer."""

    experimental_attention_variant: str | None = flag(None, choices=ATTENTION_VARIANTS)
    """Attention that replaces --attention-module: linear attention in the layers of --linear-attention-freq
    (gated_delta_net, as in Qwen3-Next), or DeepSeek sparse attention (dsa). Default: every layer uses
    --attention-module."""

    linear_attention_freq: str | None = flag(
        None, no_effect_without="--experimental-attention-variant", effective="linear_pattern"
    )
    """Layers with linear attention. N: all layers except N - 1, 2N - 1, ..., which have --attention-module instead. A
    list such as "([1]*3+[0]*1)*4": one entry per layer, 1 for linear attention and 0 for --attention-module. Default:
    every layer has linear attention."""

    layer_module: str = flag("transformer_layer", choices=LAYERS)
    """Layer class, which composes normalization, attention and MLP."""

    loss_func: str = flag("cross_entropy", choices=LOSSES, training_only=True)
    """Loss function, which is applied to each token. Training minimizes the mean over tokens."""

    mtp_num_layers: int | None = flag(None, at_least=0, training_only=True, effective="mtp_depths")
    """Number of multi-token prediction (MTP) modules after the last layer, each of which predicts one more future
    token (DeepSeek-V3). Default: none."""

    mtp_loss_scaling_factor: float = flag(
        0.1, at_least=0, no_effect_without="--mtp-num-layers", may_change=True, training_only=True
    )
    """Weight of the multi-token prediction loss. The losses of all modules are averaged, multiplied by this weight, and
    added to the main loss."""

    mtp_layer_kind: str = flag(
        "own_number",
        choices=("own_number", "last_layer"),
        no_effect_without="--mtp-num-layers",
        training_only=True,
        effective="mtp_layers",
    )
    """Window and rotary embedding of multi-token prediction modules, if these settings differ between the layers of the
    model. own_number: module k uses the settings of decoder layer k, as in Megatron-LM. last_layer: all modules use the
    settings of the last decoder layer."""

    z_loss_coeff: float = flag(0.0, training_only=True)
    """Coefficient of the z-loss on output logits, which is added to the cross entropy (PaLM); 1e-4 is common."""

    embedding_multiplier: float = 1.0
    """Scale factor of word embeddings (Granite)."""

    residual_multiplier: float = 1.0
    """Scale factor of each sublayer's output in the residual addition (Granite)."""

    logits_scaling: float = 1.0
    """Divisor of the output logits (Granite)."""

    final_logit_softcapping: float | None = None
    """Replace each output logit z by c tanh(z / c), where c is this number (Gemma 2). Default: no cap."""

    add_bias_linear: bool = flag(True, name="--disable-bias-linear", first_run=True)
    """Remove the bias of all linear layers, including experts and the router."""

    add_qkv_bias: bool = False
    """Add a bias to the query-key-value projection, even with --disable-bias-linear."""

    add_attention_output_bias: bool = flag(False, no_effect_without="--disable-bias-linear")
    """Add a bias to the output projection of attention, even with --disable-bias-linear."""

    add_mlp_bias: bool = flag(False, no_effect_without="--disable-bias-linear")
    """Add a bias to both linear layers of MLPs and shared experts, even with --disable-bias-linear (GPT-J)."""

    add_output_layer_bias: bool = False
    """Add a bias to the output layer, which has none by default (GPT-J, Phi)."""

    untie_embeddings_and_output_weights: bool = flag(False, first_run=True)
    """Use a separate weight for the output layer instead of sharing the word embedding's."""

    attention_dropout: float = flag(0.1, at_least=0, below=1, training_only=True)
    """Dropout probability of attention weights."""

    hidden_dropout: float = flag(0.1, at_least=0, below=1, training_only=True)
    """Dropout probability of embeddings and of the output of each sublayer."""

    init_method_std: float = flag(0.02, at_least=0, training_only=True)
    """Standard deviation of initial weights. The initial weights of output projections have this standard deviation
    divided by sqrt(2 * num-layers), or by sqrt(num-layers) if layers have a single sublayer."""

    embedding_init_method_std: float | None = flag(None, training_only=True, effective="embedding_init_std")
    """Standard deviation of initial word and position embeddings; default: init-method-std."""

    vocab_size: int | None = flag(None, first_run=True)
    """Tokens in the vocabulary before padding; default: the tokenizer's."""

    default_vocab_size: int | None = flag(None, at_least=1, without_effect=True)
    """Vocabulary size that is used if neither --vocab-size nor a tokenizer is given, as in a dry run of a preset."""

    make_vocab_size_divisible_by: int = flag(128, training_only=True, effective="padded_vocab_size")
    """Pad the vocabulary to a multiple of this number, under every layout."""

    pad_vocab_size_to: int | None = flag(None, training_only=True, effective="padded_vocab_size")
    """Pad the vocabulary to this size, instead of to a multiple of --make-vocab-size-divisible-by."""

    window_size: int | None = None
    """Sliding-window attention: each token attends to this many tokens, including itself."""

    attention_chunk_size: int | None = flag(None, excludes="--window-size")
    """Chunked attention: documents are cut into chunks of this many tokens, and each token attends to its own chunk
    (Llama 4)."""

    window_attn_skip_freq: str | None = flag(None, no_effect_without=LOCAL)
    """Layers with full attention in a model with --window-size or --attention-chunk-size. N: layers N - 1, 2N - 1, ....
    A list: one entry per layer, 1 for a window or chunks and 0 for full attention. Default: no layer has full
    attention."""

    @property
    def tied_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights
