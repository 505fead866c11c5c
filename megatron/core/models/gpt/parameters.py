"""The parameters of a GPT model of built-in parts, as their ParamMetas say. No torch.

`parameter_metas` lists the parameters that a pipeline stage holds, in the order in which the stage builds them; a test
compares it with models that are really built, so that plans count what trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta

WORD_EMBEDDING = "embedding.word_embeddings.weight"

DECLARED = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "squared_relu", "swiglu"),
    "attention_module": ("self_attention",),
    "mlp_module": ("mlp",),
    "layer_module": ("transformer_layer",),
    "loss_func": ("cross_entropy",),
}
"""Field of the configuration -> the parts whose parameters are listed here. An extension's are not."""


def is_declared(config: TransformerConfig) -> bool:
    """Whether `parameter_metas` knows all parts of a model."""
    return all(getattr(config, field) in parts for field, parts in DECLARED.items())


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

    `tied_stages` are the stages on different ranks that each hold a tied embedding, if several do.
    The vocabulary size must be known.
    """
    build = _Builder(config, sequence_parallel, tied_stages)
    found: list[ParamMeta] = []
    if first:
        found += build.embedding()
    for layer in range(config.num_layers) if layers is None else layers:
        found += build.layer(layer)
    if last:
        found += build.hidden_norm("decoder.final_layernorm")
        if config.untie_embeddings_and_output_weights:
            found.append(build.vocabulary("output_layer.weight"))
        elif not first:
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
        self.output = Init("normal", config.output_init_std)

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
