"""Parameters, FLOPs and activation bytes of a model, as functions of its configuration. No torch.

`parameter_metas` is the list of parameters that a pipeline stage holds, in the order in which the stage builds
them; a test compares it with the model that is really built, so plans count what trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from megatron.core.config import TransformerConfig
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
        fc1, dim = ((2, c.ffn_size), 1) if c.swiglu else ((c.ffn_size,), 0)
        yield from self.column_linear(f"{prefix}.mlp.linear_fc1", fc1, dim, c.add_bias_linear)
        yield from self.row_linear(f"{prefix}.mlp.linear_fc2", c.ffn_size)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; a tied embedding counts once."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    output_layer: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.output_layer


def count_parameters(config: TransformerConfig, metas: Sequence[ParamMeta] | None = None) -> ParameterCount:
    """Counts of the whole model, or of `metas`."""
    metas = parameter_metas(config, whole_model(config)) if metas is None else metas
    sums = dict.fromkeys(("embedding", "attention", "mlp", "norms", "output_layer"), 0)
    for meta in metas:
        sums[_component(meta.name)] += meta.numel
    return ParameterCount(**sums)


def _component(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "output_layer"
    if ".self_attention." in name:
        return "attention"
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
    """6 x matmul parameters + 6 L h s for causal attention (with h the width of all query heads together)."""
    attention = config.hidden_size * 2 * (config.query_projection_size + config.kv_projection_size)
    mlp = (3 if config.swiglu else 2) * config.hidden_size * config.ffn_size
    head = config.padded_vocab_size * config.hidden_size
    matmul = config.num_layers * (attention + mlp) + head
    attended = attended_tokens(config, seq_length)
    return FlopsPerToken(6 * matmul, 12 * config.num_layers * config.query_projection_size * attended)


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
