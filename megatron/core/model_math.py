"""Parameters, FLOPs and activation bytes of a model, as functions of its configuration. No torch.

`parameter_metas` is the list of parameters that a pipeline stage holds, in the order in which the stage builds
them; a test compares it with the model that is really built, so plans count what trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

WORD_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds: its layers by global number, the embedding (first), norm and head (last)."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True


def whole_model(config: TransformerConfig) -> Stage:
    """The one stage of a model without pipeline parallelism."""
    return Stage(range(config.num_layers))


def parameter_metas(
    config: TransformerConfig, stage: Stage, *, sequence_parallel: bool = False, tied_stages: tuple[int, ...] = ()
) -> list[ParamMeta]:
    """The parameters of a stage, in the order of `GPTModel`.

    `tied_stages` are the stages on different ranks that each hold a tied embedding, if several do.
    The vocabulary size must be known.
    """
    build = _Builder(config, sequence_parallel, tied_stages)
    found: list[ParamMeta] = []
    if stage.first:
        found += build.embedding()
    for layer in stage.layers:
        found += build.layer(layer)
    if stage.last:
        found += build.hidden_norm("decoder.final_layernorm")
        if config.untie_embeddings_and_output_weights:
            found.append(build.vocabulary("output_layer.weight"))
        elif not stage.first:
            found.append(build.vocabulary(WORD_EMBEDDING))
    return found


class _Builder:
    """Metas of each piece of the model, under the names and shapes that checkpoints know."""

    def __init__(self, config: TransformerConfig, sequence_parallel: bool, tied_stages: tuple[int, ...]) -> None:
        self.config = config
        # What acts on sequence-parallel activations sees a part of the sequence: its gradient is a partial sum.
        self.sequence_partial = ("tp",) if sequence_parallel else ()
        self.shared_stages = tied_stages if config.tied_embeddings else ()
        self.normal = Init("normal", config.init_method_std)
        self.output = Init("normal", config.init_method_std / sqrt(2 * max(config.num_layers, 1)))

    def vocabulary(self, name: str) -> ParamMeta:
        shape = (self.config.padded_vocab_size, self.config.hidden_size)
        shared = self.shared_stages if name == WORD_EMBEDDING else ()
        return ParamMeta(name, shape, {"tp": 0}, self.normal, shared_stages=shared)

    def embedding(self) -> Iterator[ParamMeta]:
        c = self.config
        yield self.vocabulary(WORD_EMBEDDING)
        if c.position_embedding_type == "learned_absolute":
            shape = (c.max_positions, c.hidden_size)
            name = "embedding.position_embeddings.weight"
            yield ParamMeta(name, shape, {}, self.normal, partial_over=self.sequence_partial)

    def norm(self, name: str, size: int, partial_over: tuple[str, ...]) -> Iterator[ParamMeta]:
        yield ParamMeta(f"{name}.weight", (size,), {}, Init("ones"), partial_over=partial_over)
        if self.config.normalization == "LayerNorm":
            yield ParamMeta(f"{name}.bias", (size,), {}, Init("zeros"), partial_over=partial_over)

    def hidden_norm(self, name: str) -> Iterator[ParamMeta]:
        return self.norm(name, self.config.hidden_size, self.sequence_partial)

    def column_linear(self, name: str, rows: tuple[int, ...], dim: int, bias: bool) -> Iterator[ParamMeta]:
        """A linear layer whose outputs are cut over TP; `rows` is the shape of its outputs, `dim` the one cut."""
        yield ParamMeta(f"{name}.weight", (*rows, self.config.hidden_size), {"tp": dim}, self.normal)
        if bias:
            yield ParamMeta(f"{name}.bias", rows, {"tp": dim}, Init("zeros"))

    def row_linear(self, name: str, columns: int) -> Iterator[ParamMeta]:
        """A linear layer whose inputs are cut over TP; every rank holds its whole bias."""
        h = self.config.hidden_size
        yield ParamMeta(f"{name}.weight", (h, columns), {"tp": 1}, self.output)
        if self.config.add_bias_linear:
            yield ParamMeta(f"{name}.bias", (h,), {}, Init("zeros"), partial_over=self.sequence_partial)

    def layer(self, number: int) -> Iterator[ParamMeta]:
        c, prefix = self.config, f"decoder.layers.{number}"
        yield from self.hidden_norm(f"{prefix}.input_layernorm")
        qkv = (c.query_groups, c.queries_per_group + 2, c.head_dim)
        qkv_bias = c.add_bias_linear or c.add_qkv_bias
        yield from self.column_linear(f"{prefix}.self_attention.linear_qkv", qkv, 0, qkv_bias)
        if c.qk_layernorm:
            # One weight for all heads: each TP rank sees its own heads only.
            for name in ("q_layernorm", "k_layernorm"):
                yield from self.norm(f"{prefix}.self_attention.{name}", c.head_dim, ("tp",))
        yield from self.row_linear(f"{prefix}.self_attention.linear_proj", c.query_projection_size)
        yield from self.hidden_norm(f"{prefix}.pre_mlp_layernorm")
        if number in c.moe_layers:
            yield from self.experts(f"{prefix}.mlp")
        else:
            yield from self.mlp(f"{prefix}.mlp", c.ffn_size)

    def mlp(self, name: str, ffn: int) -> Iterator[ParamMeta]:
        fc1, dim = ((2, ffn), 1) if self.config.gated else ((ffn,), 0)
        yield from self.column_linear(f"{name}.linear_fc1", fc1, dim, self.config.add_bias_linear)
        yield from self.row_linear(f"{name}.linear_fc2", ffn)

    def experts(self, name: str) -> Iterator[ParamMeta]:
        """Router, experts, and the shared expert if there is one. The router's states are not trained, and not here."""
        c = self.config
        count, h, ffn = c.num_experts or 0, c.hidden_size, c.moe_ffn_size
        yield ParamMeta(f"{name}.router.weight", (count, h), {}, self.normal, partial_over=self.sequence_partial)
        fc1, dim = ((count, 2, ffn, h), 2) if c.gated else ((count, ffn, h), 1)
        fc1_cut, fc2_cut = {"ep": 0, "expt_tp": dim}, {"ep": 0, "expt_tp": 2}
        yield ParamMeta(f"{name}.experts.linear_fc1.weight", fc1, fc1_cut, self.normal, expert=True)
        yield ParamMeta(f"{name}.experts.linear_fc2.weight", (count, h, ffn), fc2_cut, self.output, expert=True)
        if c.moe_shared_expert_intermediate_size:
            yield from self.mlp(f"{name}.shared_experts", c.moe_shared_expert_intermediate_size)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; a tied embedding counts once."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    """Dense layers' and shared experts."""
    router: int = 0
    experts: int = 0
    norms: int = 0
    output_layer: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_parameters(config: TransformerConfig, metas: Sequence[ParamMeta] | None = None) -> ParameterCount:
    """Counts of the whole model, or of `metas`."""
    metas = parameter_metas(config, whole_model(config)) if metas is None else metas
    sums: dict[str, int] = {}
    for meta in metas:
        component = _component(meta.name)
        sums[component] = sums.get(component, 0) + meta.numel
    return ParameterCount(**sums)


def active_parameters(config: TransformerConfig) -> int:
    """Parameters that a token meets: of the experts, those it is routed to."""
    count = count_parameters(config)
    if not count.experts or config.num_experts is None:
        return count.total
    return count.total - count.experts + count.experts * config.moe_router_topk // config.num_experts


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
    return "mlp" if ".mlp." in name else "norms"


@dataclass(frozen=True)
class FlopsPerToken:
    """Model FLOPs of forward and backward per token. Recomputation is not counted."""

    matmul: int
    """6 x the parameters of matrix multiplications, the output layer included, the embedding table not."""

    attention: float
    """Scores and weighted values, causal: half of the s x s square."""

    @property
    def total(self) -> float:
        return self.matmul + self.attention


def attended_tokens(config: TransformerConfig, seq_length: int | None = None) -> float:
    """Mean number of tokens that a token attends to: s/2 causal, less under a sliding window (w - w^2 / 2s)."""
    s = seq_length or config.seq_length
    w = min(config.window_size or s, s)
    return w * (1 - w / (2 * s))


def model_flops(config: TransformerConfig, seq_length: int | None = None) -> FlopsPerToken:
    """6 x active matmul parameters + 6 L h s for causal attention (with h the width of all query heads together)."""
    attention = config.hidden_size * 2 * (config.query_projection_size + config.kv_projection_size)
    head = config.padded_vocab_size * config.hidden_size
    moe = len(config.moe_layers)
    mlps = (config.num_layers - moe) * _mlp_weights(config, config.ffn_size) + moe * _moe_weights(config)
    matmul = config.num_layers * attention + mlps + head
    attended = attended_tokens(config, seq_length)
    return FlopsPerToken(6 * matmul, 12 * config.num_layers * config.query_projection_size * attended)


def _mlp_weights(config: TransformerConfig, ffn: int) -> int:
    return (3 if config.gated else 2) * config.hidden_size * ffn


def _moe_weights(config: TransformerConfig) -> int:
    """What a token meets in one mixture-of-experts layer: router, k experts, shared expert."""
    experts = config.moe_router_topk * config.moe_ffn_size + (config.moe_shared_expert_intermediate_size or 0)
    return config.hidden_size * (config.num_experts or 0) + _mlp_weights(config, experts)


def flops_per_token(config: TransformerConfig, seq_length: int | None = None) -> float:
    """Model FLOPs of forward and backward per token, causal: `model_flops` in one number."""
    return model_flops(config, seq_length).total


def activation_bytes_per_layer(
    config: TransformerConfig,
    micro_batch_size: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str | None = None,
) -> float:
    """Bytes that one layer of the published reference keeps for one micro-batch (arXiv 2205.05198, table 2).

    The formulas hold for 16-bit activations, dropout on, as many key/value heads as heads, an MLP of width 4h
    with GeLU and an attention that keeps its scores: a yardstick for any model, exact for that one.
    """
    s, h, a = config.seq_length, config.hidden_size, config.num_attention_heads
    sbh = s * micro_batch_size * h
    scores = 5 * a * s / h
    if recompute == "full":
        return 2 * sbh
    if recompute == "selective":
        scores = 0
    if sequence_parallel:
        return sbh / tp * (34 + scores)
    return sbh * (10 + 24 / tp + scores / tp)
