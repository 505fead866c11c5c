"""The registries of all kinds of parts that a run is built of, and the library's own parts in them. No torch.

An extension adds to the same registries: `NORMALIZATIONS.register("MyNorm", MyNorm)`, or as a decorator. Below each
registry stands how its parts are built. `config` is the section of the run's configuration that the part belongs to;
`config.options(Cls)` are the values of an extension's own flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.registry import NoFacts, Registry

NORMALIZATIONS: Registry[Any, NoFacts] = Registry("--normalization", NoFacts, "name, size, config, ctx, partial_over")
"""`Norm(name, size, config, ctx, partial_over)`: a module over the last dim, `size` wide. `partial_over` is that of its
parameters' ParamMeta."""

NORMALIZATIONS.register("LayerNorm", "megatron.core.transformer.norm:LayerNorm")
NORMALIZATIONS.register("RMSNorm", "megatron.core.transformer.norm:RMSNorm")


@dataclass(frozen=True)
class ActivationFacts:
    gated: bool = False
    """Whether it maps [..., 2f], gate before up, to [..., f]; else it keeps the width."""

    bounded: bool = False
    """Whether --activation-func-clamp-value and --glu-linear-offset apply to it."""


ACTIVATIONS: Registry[Any, ActivationFacts] = Registry("--activation-func", ActivationFacts, "name, config, ctx")
"""`Activation(name, config, ctx)`: a function or module between the two linear layers of MLPs and experts. It sees a
part of the width, so its parameters have `partial_over=("tp",)`."""

ACTIVATIONS.register("gelu", "megatron.core.transformer.activations:build_gelu")
ACTIVATIONS.register("gelu_tanh", "megatron.core.transformer.activations:build_gelu_tanh")
ACTIVATIONS.register("squared_relu", "megatron.core.transformer.activations:build_squared_relu")
ACTIVATIONS.register("xielu", "megatron.core.transformer.xielu:XIELU")
for _gated in ("swiglu", "geglu", "geglu_tanh", "quick_geglu"):
    _function = f"megatron.core.transformer.activations:build_{_gated}"
    ACTIVATIONS.register(_gated, _function, gated=True, bounded=True)


class HeadWidths(NamedTuple):
    """Channels of heads."""

    key: int
    """Of a query or key head."""

    rotary: int
    """Those of a query or key head that --rotary-percent is a fraction of."""

    value: int
    """Of a value head."""


def grouped_widths(config: Any) -> HeadWidths:
    """Channels of the heads of self-attention."""
    key = config.kv_channels or config.hidden_size // config.num_attention_heads
    return HeadWidths(key, key, config.value_channels or key)


@dataclass(frozen=True)
class MixerFacts:
    parameters: str | None = None
    """Where its parameters are listed, "module:function" of a module without torch: (name, config, sequence_parallel)
    -> their ParamMetas. None: plans build the model on fake tensors to see them."""

    rules: str | None = None
    """Where its rules are, in the same form: (RunConfig, world size) -> problems of a model that has it."""

    described: Callable[[Any], str] = lambda config: ""
    """Model's configuration -> what a plan says of its heads beside their number and width."""


@dataclass(frozen=True)
class LinearAttentionFacts(MixerFacts):
    whole_sequences: bool = False
    """Whether it sees the tokens of all context-parallel ranks."""


@dataclass(frozen=True)
class AttentionFacts(MixerFacts):
    """Functions are of the model's configuration. The defaults are self-attention's."""

    chosen_by: Callable[[Any], bool] = lambda config: False
    """Whether a flag of its own chooses it in place of --attention-module."""

    widths: Callable[[Any], HeadWidths] = grouped_widths

    grouped: bool = True
    """Whether its heads are those of --kv-channels and --num-query-groups, of whose rows linear_qkv consists."""

    rotates: bool = False
    """Whether it has a rotary embedding whatever --position-embedding-type is."""

    rope_type: str = "rope"
    """Its --rope-type if none is given."""

    scales_scores: bool = False
    """Whether --mscale-all-dim scales attention scores."""


ATTENTIONS: Registry[Any, AttentionFacts] = Registry("--attention-module", AttentionFacts, "name, config, ctx")
"""`Attention(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h]."""

ATTENTIONS.register(
    "self_attention",
    "megatron.core.transformer.self_attention:SelfAttention",
    parameters="megatron.core.transformer.parameters:self_attention_metas",
)

LINEAR_ATTENTIONS: Registry[Any, LinearAttentionFacts] = Registry(
    "--experimental-attention-variant", LinearAttentionFacts, "name, config, ctx"
)
"""The same in the layers of --linear-attention-freq. What it reads of earlier tokens has a size of its own; generation
keeps it in `context.cache.states`."""

MLPS: Registry[Any, NoFacts] = Registry("--mlp-module", NoFacts, "name, config, ctx")
"""`MLP(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h], in layers without experts."""

MLPS.register("mlp", "megatron.core.transformer.mlp:MLP")

LAYERS: Registry[Any, NoFacts] = Registry("--layer-module", NoFacts, "name, config, ctx")
"""`Layer(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h]; `ctx.layer` is its number."""

LAYERS.register("transformer_layer", "megatron.core.transformer.layer:TransformerLayer")


@dataclass(frozen=True)
class RecomputedFacts:
    within: str | None = None
    """A larger part that includes it."""

    needs: str = ""
    """What a model without it lacks: a flag."""


RECOMPUTED_PARTS: Registry[Any, RecomputedFacts] = Registry("--recompute-modules", RecomputedFacts, "config")
"""`has(config)`: whether the model has a part that selective recomputation can compute again. Modules that are such a
part ask `config.recomputes(name)`."""

RECOMPUTED_PARTS.register("core_attn", lambda config: True)
RECOMPUTED_PARTS.register("layernorm", lambda config: True)
RECOMPUTED_PARTS.register("mlp_act", lambda config: True, within="mlp")
RECOMPUTED_PARTS.register("mlp", lambda config: True)
RECOMPUTED_PARTS.register("moe_act", lambda config: config.num_experts is not None, within="moe", needs="--num-experts")
RECOMPUTED_PARTS.register("moe", lambda config: config.num_experts is not None, needs="--num-experts")
RECOMPUTED_PARTS.register(
    "shared_experts",
    lambda config: bool(config.moe_shared_expert_intermediate_size),
    within="moe",
    needs="--moe-shared-expert-intermediate-size",
)


@dataclass(frozen=True)
class LossFacts:
    multi_token: bool = False
    """Whether it may be called with the labels of a later token (--mtp-num-layers): each loss follows from its logits
    and its label alone."""


LOSSES: Registry[Any, LossFacts] = Registry("--loss-func", LossFacts, "config, ctx", attributes=("prepare",))
"""`Loss(config, ctx)`: see `megatron.core.models.gpt.loss.TokenLoss`."""

LOSSES.register("cross_entropy", "megatron.core.models.gpt.loss:CrossEntropy", multi_token=True)


@dataclass(frozen=True)
class OptimizerFacts:
    states: tuple[str, ...]
    """Names of the tensors kept for each element of the parameters beside the main parameter."""

    whole_matrices: bool = False
    """Whether it updates the matrices of hidden layers, each as a whole, and leaves the rest to
    --muon-scalar-optimizer; else it updates all parameters, element by element."""


OPTIMIZERS: Registry[Any, OptimizerFacts] = Registry(
    "--optimizer", OptimizerFacts, lambda facts: "config, shards" + ", exchange" * facts.whole_matrices
)
"""`MyOptimizer(config, shards)`: see `megatron.core.optimizer.optimizer.Optimizer`. With `whole_matrices` it is
`MyOptimizer(config, shards, exchange)`: see `megatron.core.optimizer.muon.Muon`."""

OPTIMIZERS.register("adam", "megatron.core.optimizer.optimizer:AdamW", states=("exp_avg", "exp_avg_sq"))
OPTIMIZERS.register("sgd", "megatron.core.optimizer.optimizer:SGD", states=("momentum_buffer",))
OPTIMIZERS.register("muon", "megatron.core.optimizer.muon:Muon", states=("momentum_buffer",), whole_matrices=True)

LR_SCHEDULES: Registry[Any, NoFacts] = Registry("--lr-decay-style", NoFacts, "samples, length, config")
"""`schedule(samples, length, config)`: learning rate after `samples` consumed samples, beyond the warm-up."""

for _style in ("constant", "linear", "cosine", "inverse_square_root", "WSD"):
    LR_SCHEDULES.register(_style.replace("_", "-"), f"megatron.core.optimizer.param_scheduler:{_style.lower()}")


@dataclass(frozen=True)
class ScheduleFacts:
    chunks: int = 1
    """Stages on a rank, where nobody says how many."""
    any_chunks: bool = False
    """Whether it is called with the number of stages on a rank as a third argument, and takes any."""
    any_groups: bool = False
    """Whether it is called with the number of micro-batches in a group as a fourth argument (None: its own choice)."""
    v_shaped: bool = False
    """Whether stages lie on the ranks there and back, so that rank 0 has the first and the last one."""
    splits_backward: bool = False
    """Whether it has I and W, the gradients of inputs and of weights, in place of B."""

    in_turns: bool = False
    """Whether it takes `in_turns=True`, for --overlap-moe-expert-parallel-comm: FB before each F and B, or I, that run
    in turns (`schedules.runs_in_turns`)."""

    def form(self) -> str:
        """The arguments of a schedule."""
        wider = ", v" * (self.any_chunks or self.any_groups) + ", group" * self.any_groups
        return f"p, m{wider}{', in_turns=' * self.in_turns}"


PIPELINE_SCHEDULES: Registry[Any, ScheduleFacts] = Registry("--pipeline-schedule", ScheduleFacts, ScheduleFacts.form)
"""`schedule(p, m)`: for each of p pipeline ranks its actions on m micro-batches, in order."""

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
PIPELINE_SCHEDULES.register("gpipe", f"{_SCHEDULES}:gpipe")
PIPELINE_SCHEDULES.register("1f1b", f"{_SCHEDULES}:one_f_one_b", in_turns=True)
PIPELINE_SCHEDULES.register(
    "interleaved", f"{_SCHEDULES}:interleaved", chunks=2, any_chunks=True, any_groups=True, in_turns=True
)
PIPELINE_SCHEDULES.register("zb-h1", f"{_SCHEDULES}:zb_h1", splits_backward=True)
PIPELINE_SCHEDULES.register("zb-h2", f"{_SCHEDULES}:zb_h2", splits_backward=True, in_turns=True)
PIPELINE_SCHEDULES.register("zb-v", f"{_SCHEDULES}:zb_v", chunks=2, v_shaped=True, splits_backward=True)

DATASETS: Registry[Any, NoFacts] = Registry("--dataset-type", NoFacts, "config, format, seed, sizes")
"""`build(config, format, seed, sizes)`: the `Datasets` of training, validation and test, `sizes` being the samples
wanted of each (None: one epoch); see `megatron.core.datasets.streaming.GeneratorDataset`."""

DATASETS.register("gpt", "megatron.core.datasets.build:build_gpt")
DATASETS.register("mock", "megatron.core.datasets.build:build_mock")


@dataclass(frozen=True)
class TokenizerFacts:
    needs: tuple[str, ...] = ()
    """Fields of TokenizerConfig that must name a file."""
    finds_files: bool = False
    """Whether these may also be names that it finds files by."""


TOKENIZERS: Registry[Any, TokenizerFacts] = Registry("--tokenizer-type", TokenizerFacts, "config, vocab_size")
"""`build(config, vocab_size)`: a `megatron.core.tokenizers.tokenizer.Tokenizer`; `vocab_size` is --vocab-size."""

_TOKENIZERS, _MODEL = "megatron.core.tokenizers.build", ("tokenizer_model",)
TOKENIZERS.register("SentencePieceTokenizer", f"{_TOKENIZERS}:sentencepiece", needs=_MODEL)
TOKENIZERS.register("Llama2Tokenizer", f"{_TOKENIZERS}:llama2", needs=_MODEL)
TOKENIZERS.register("HuggingFaceTokenizer", f"{_TOKENIZERS}:huggingface", needs=_MODEL, finds_files=True)
TOKENIZERS.register("GPT2BPETokenizer", f"{_TOKENIZERS}:gpt2_bpe", needs=("vocab_file", "merge_file"))
TOKENIZERS.register("NullTokenizer", f"{_TOKENIZERS}:null")
TOKENIZERS.register("ByteTokenizer", f"{_TOKENIZERS}:byte")

HF_FAMILIES: Registry[Any, NoFacts] = Registry("model_type", NoFacts, attributes=("model_type", "architecture"))
"""A `megatron.extensions.hugging_face.families.Family` for each `model_type` of Hugging Face."""

for _family in (
    *("gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    *("gemma", "starcoder2", "gpt_neox", "smollm3", "olmo2", "olmo3", "olmoe", "granite"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "exaone_moe", "afmoe", "qwen3_next", "apertus"),
    "bailing_moe",
    *("exaone4", "mimo_v2_flash", "step3p5"),
    "gpt_oss",
):
    HF_FAMILIES.register(_family, f"megatron.extensions.hugging_face.families:{_family.upper()}")
HF_FAMILIES.register("gemma2", "megatron.extensions.hugging_face.families:GEMMA2")
HF_FAMILIES.register("gemma3_text", "megatron.extensions.hugging_face.families:GEMMA3")
HF_FAMILIES.register("llama4_text", "megatron.extensions.hugging_face.families:LLAMA4")
