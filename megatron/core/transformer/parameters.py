"""Parameters of the built-in norms, attention and MLP. No torch.

Their modules are built from these functions, and plans count what the functions return.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Fused, Init, ParamMeta
from megatron.core.parts import NORMALIZATIONS
from megatron.core.registry import imported
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear, metas_of

HEAD_NORMS = ("q_layernorm", "k_layernorm")
HEAD_NORM_PARTIAL_OVER = ("tp",)
"""One weight for all heads. A rank has some of them: its gradient is partial, sequence parallel or not."""


def query_key_norm_metas(name: str, config: TransformerConfig) -> list[ParamMeta]:
    """The norms of queries and keys in the attention of this name."""
    if not config.qk_layernorm:
        return []
    if config.qk_layernorm_scope == "head":
        return [
            meta
            for norm in HEAD_NORMS
            for meta in model_norm_metas(f"{name}.{norm}", config.head_dim, HEAD_NORM_PARTIAL_OVER, config)
        ]
    counts = config.num_attention_heads, config.query_groups
    return [heads_norm_meta(f"{name}.{norm}", heads, config) for norm, heads in zip(HEAD_NORMS, counts, strict=True)]


def norm_metas(
    name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig, *, bias: bool
) -> list[ParamMeta]:
    """The weight of a norm over `size` channels, and the bias if there is one, as far as --norm-parameters has them."""
    inits = {"weight": Init("zeros" if config.apply_layernorm_1p else "ones")}
    if bias:
        inits["bias"] = Init("zeros")
    inits = {} if config.norm_parameters == "none" else inits
    if config.norm_parameters == "weight":
        inits.pop("bias", None)
    return [ParamMeta(f"{name}.{key}", (size,), {}, init, partial_over) for key, init in inits.items()]


def layer_norm_metas(name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig) -> list[ParamMeta]:
    """The parameters of a `LayerNorm`."""
    return norm_metas(name, size, partial_over, config, bias=True)


def rms_norm_metas(name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig) -> list[ParamMeta]:
    """The parameters of an `RMSNorm`."""
    return norm_metas(name, size, partial_over, config, bias=False)


def model_norm_metas(name: str, size: int, partial_over: tuple[str, ...], config: TransformerConfig) -> list[ParamMeta]:
    """The parameters of the model's norm (--normalization) over `size` channels; an RMSNorm's for a norm that lists
    none."""
    listed = NORMALIZATIONS.facts(config.normalization).parameters
    metas: list[ParamMeta] = list(imported(listed or rms_norm_metas)(name, size, partial_over, config))
    return metas


def sinks_metas(name: str, config: TransformerConfig, init: Init | None = None) -> list[ParamMeta]:
    """The attention sink of each head in the attention of this name, where sinks are learned. Their initial values are
    those of weights by default."""
    if config.softmax_type != "learnable":
        return []
    init = init or Init("normal", config.init_method_std)
    return [ParamMeta(f"{name}.core.softmax_offset", (config.num_attention_heads,), {"tp": 0}, init)]


def head_counts(config: TransformerConfig) -> tuple[int, int, int, int]:
    """Heads of a query group: queries, gates of their outputs, keys, values."""
    queries = config.queries_per_group
    return queries, queries if config.attention_output_gate or config.head_wise_attn_gate else 0, 1, 1


def head_widths(config: TransformerConfig) -> tuple[int, int, int, int]:
    """Channels of each of these heads. A gate of a whole head is one number."""
    key, value = config.head_dim, config.value_head_dim
    return key, 1 if config.head_wise_attn_gate else value, key, value


def group_rows(config: TransformerConfig) -> tuple[int, ...]:
    """Rows of linear_qkv of a query group: all its queries, gates, keys and values."""
    return tuple(count * width for count, width in zip(head_counts(config), head_widths(config), strict=True))


def has_even_heads(config: TransformerConfig) -> bool:
    """Whether all these heads have the same width."""
    return all(
        rows == count * config.head_dim for rows, count in zip(group_rows(config), head_counts(config), strict=True)
    )


def heads_norm_meta(name: str, heads: int, config: TransformerConfig) -> ParamMeta:
    """The weight of norms of queries or keys that heads do not share: of one over the channels of all heads, as one
    dim, or of one for each head [heads, channels]. Heads are sharded."""
    init, widths = Init("zeros" if config.apply_layernorm_1p else "ones"), (heads, config.head_dim)
    shape = widths if config.qk_layernorm_scope == "each" else (prod(widths),)
    return ParamMeta(f"{name}.weight", shape, {"tp": 0}, init)


def attention_linears(name: str, config: TransformerConfig) -> tuple[ColumnLinear, RowLinear]:
    """linear_qkv [groups, heads, channels, h], or [groups, rows, h] where heads differ in width, and linear_proj. A
    group's rows of linear_qkv: its query heads, the gates of their outputs if there are any, then its key, then its
    value."""
    hidden, bias = config.hidden_size, config.add_bias_linear
    of_output = bias or config.add_attention_output_bias
    even = has_even_heads(config)
    sizes = head_counts(config) if even else group_rows(config)
    out_dims = (config.query_groups, sum(sizes), *((config.head_dim,) if even else ()))
    fused = Fused("qkv", 1, tuple(size for size in sizes if size))
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    return (
        ColumnLinear(f"{name}.linear_qkv", hidden, out_dims, bias or config.add_qkv_bias, init, fused=fused),
        RowLinear(f"{name}.linear_proj", config.attention_output_size, hidden, of_output, output_init),
    )


def self_attention_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of self-attention."""
    qkv, proj = attention_linears(name, config)
    norms = query_key_norm_metas(name, config)
    return metas_of((qkv, *norms, *sinks_metas(name, config), proj), sequence_parallel)


def mlp_linears(name: str, config: TransformerConfig, ffn: int) -> tuple[ColumnLinear, RowLinear]:
    """linear_fc1 and linear_fc2. A gated fc1 stacks gate and up as [2, ffn, h], each sharded over the ranks."""
    hidden, bias = config.hidden_size, config.add_bias_linear or config.add_mlp_bias
    out_dims, shard_dim = ((2, ffn), 1) if config.gated else ((ffn,), 0)
    fused = Fused("gate_up", 0, (1, 1)) if config.gated else None
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    return (
        ColumnLinear(f"{name}.linear_fc1", hidden, out_dims, bias, init, shard_dim, fused),
        RowLinear(f"{name}.linear_fc2", ffn, hidden, bias, output_init),
    )
