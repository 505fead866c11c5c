"""Hugging Face families: names and layouts of weights, and with families.json the keys of config.json.

A `Rule` pairs one of our parameters with their tensors. Its `Layout` converts in both directions, bit for bit. A
`Family` has the rules of a `model_type` and maps the keys of its config.json to our fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor, cat, stack

from megatron.core.config.model import TransformerConfig
from megatron.core.models.hf.safetensors_file import Sliceable

Box = tuple[slice, ...]
"""One slice with a start and a stop for each dim."""


class Layout:
    """How one of our parameters is made of their tensors, and the other way round, bit for bit."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """Converts their tensors to our parameter. Raises ValueError or RuntimeError if their shapes do not fit."""
        raise NotImplementedError

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        """Converts our parameter to their tensors."""
        raise NotImplementedError

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        """A box of `ours`. Their tensors may be on disk; overridden where less than all of them needs to be read."""
        return self.ours(config, [tensor[()] for tensor in tensors])[box]


class Same(Layout):
    """One tensor, the same on both sides."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter,)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][box]


class Transposed(Layout):
    """Transposed: GPT-2 stores [in, out], we store [out, in]. A bias is the same on both sides."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t().contiguous()

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter.t().contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][box[::-1]].t().contiguous()


class VocabularyRows(Layout):
    """Rows of the vocabulary: ours are padded with zeros to the padded vocabulary."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors[0]) != config.vocab_size:
            raise ValueError(f"{len(tensors[0])} rows do not fit a vocabulary of {config.vocab_size} tokens")
        return self.part(config, tensors, (slice(0, config.padded_vocab_size),))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter[: config.vocab_size].contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        first, last = (min(end, config.vocab_size or 0) for end in (box[0].start, box[0].stop))
        rows = tensors[0][(slice(first, last), *box[1:])]
        padding = box[0].stop - box[0].start - len(rows)
        return cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


class Stacked(Layout):
    """Several tensors of one shape, stacked along a new first dim, such as gate and up of a gated MLP."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return stack(list(tensors))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in parameter.unbind())

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return stack([tensor[box[1:]] for tensor in tensors[box[0]]])


class StackedExperts(Layout):
    """Gate and up of all experts as [E, 2, ffn, h]; they store them expert by expert."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return stack(list(tensors)).unflatten(0, (-1, 2))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in parameter.flatten(0, 1).unbind())

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts = [tensors[2 * expert : 2 * expert + 2][box[1]] for expert in range(box[0].start, box[0].stop)]
        return stack([stack([tensor[box[2:]] for tensor in halves]) for halves in experts])


class QueryGroups(Layout):
    """Theirs: q [heads * d, ...], k and v [groups * d, ...]. Ours: [groups, q_per_group + 2, d, ...]."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return self.join(tensors, config.query_groups, config.head_dim)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        parts = parameter.split((config.queries_per_group, 1, 1), dim=1)
        return tuple(part.flatten(0, 2).contiguous() for part in parts)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        rows = [n * config.head_dim for n in (config.queries_per_group, 1, 1)]
        cut = [slice(groups.start * row, groups.stop * row) for row in rows]
        parts = [tensor[(rows, *rest)] for tensor, rows in zip(tensors, cut, strict=True)]
        return self.join(parts, groups.stop - groups.start, config.head_dim)[:, heads, channels]

    def join(self, tensors: Sequence[Tensor], groups: int, head_dim: int) -> Tensor:
        return cat([x.unflatten(0, (groups, -1, head_dim)) for x in tensors], dim=1)


class JointHeads(Layout):
    """GPT-2: all queries, keys and values in one tensor, concatenated along the last dim. A bias has no other dim."""

    groups = QueryGroups()

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return self.groups.ours(config, tensors[0].t().chunk(3))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (cat(self.groups.theirs(config, parameter)).t().contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        width = config.query_projection_size
        first, last = groups.start * config.head_dim, groups.stop * config.head_dim
        columns = [slice(at * width + first, at * width + last) for at in range(3)]
        parts = [tensors[0][(*rest, each)].t() for each in columns]
        return self.groups.join(parts, groups.stop - groups.start, config.head_dim)[:, heads, channels]


@dataclass(frozen=True)
class Rule:
    """One of our parameters and their tensors. `{i}` is the layer number, `{e}` stands for every expert."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = field(default_factory=Same)


OUR_LAYER = "decoder.layers.{i}"


def _linear(ours: str, theirs: str, layout: Layout) -> Iterator[Rule]:
    """Rules of a linear layer's weight and bias; `theirs` lists the names of their parts, separated by spaces."""
    for kind in ("weight", "bias"):
        yield Rule(f"{OUR_LAYER}.{ours}.{kind}", tuple(f"{part}.{kind}" for part in theirs.split()), layout)


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return Rule(f"{ours}.weight", (f"{theirs}.weight",)), Rule(f"{ours}.bias", (f"{theirs}.bias",))


GPT2_RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",), VocabularyRows()),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *_norm(f"{OUR_LAYER}.input_layernorm", "transformer.h.{i}.ln_1"),
    *_linear("self_attention.linear_qkv", "transformer.h.{i}.attn.c_attn", JointHeads()),
    *_linear("self_attention.linear_proj", "transformer.h.{i}.attn.c_proj", Transposed()),
    *_norm(f"{OUR_LAYER}.pre_mlp_layernorm", "transformer.h.{i}.ln_2"),
    *_linear("mlp.linear_fc1", "transformer.h.{i}.mlp.c_fc", Transposed()),
    *_linear("mlp.linear_fc2", "transformer.h.{i}.mlp.c_proj", Transposed()),
    *_norm("decoder.final_layernorm", "transformer.ln_f"),
    Rule("output_layer.weight", ("lm_head.weight",), VocabularyRows()),
)

_HF_LAYER = "model.layers.{i}"
_HEADS = " ".join(f"{_HF_LAYER}.self_attn.{x}_proj" for x in "qkv")
_GATED = f"{_HF_LAYER}.mlp.gate_proj {_HF_LAYER}.mlp.up_proj"

LLAMA_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabularyRows()),
    Rule(f"{OUR_LAYER}.input_layernorm.weight", (f"{_HF_LAYER}.input_layernorm.weight",)),
    *_linear("self_attention.linear_qkv", _HEADS, QueryGroups()),
    Rule(f"{OUR_LAYER}.self_attention.q_layernorm.weight", (f"{_HF_LAYER}.self_attn.q_norm.weight",)),
    Rule(f"{OUR_LAYER}.self_attention.k_layernorm.weight", (f"{_HF_LAYER}.self_attn.k_norm.weight",)),
    *_linear("self_attention.linear_proj", f"{_HF_LAYER}.self_attn.o_proj", Same()),
    Rule(f"{OUR_LAYER}.pre_mlp_layernorm.weight", (f"{_HF_LAYER}.post_attention_layernorm.weight",)),
    *_linear("mlp.linear_fc1", _GATED, Stacked()),
    *_linear("mlp.linear_fc2", f"{_HF_LAYER}.mlp.down_proj", Same()),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), VocabularyRows()),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of a model with a mixture of experts in every layer."""
    expert = f"{_HF_LAYER}.{block}.experts.{{e}}"
    return (
        *(rule for rule in LLAMA_RULES if ".mlp." not in rule.ours),
        Rule(f"{OUR_LAYER}.mlp.router.weight", (f"{_HF_LAYER}.{block}.gate.weight",)),
        Rule(
            f"{OUR_LAYER}.mlp.experts.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            StackedExperts(),
        ),
        Rule(f"{OUR_LAYER}.mlp.experts.linear_fc2.weight", (f"{expert}.{down}.weight",), Stacked()),
    )


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]

    prefix: str
    """Prefix of their names. Files of the bare decoder lack it."""

    keys: Mapping[str, str]
    """Key of config.json -> field of TransformerConfig, for equal values."""

    fixed: Mapping[str, Any]
    """Fields of TransformerConfig that are fixed for the family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that a config.json may lack."""

    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Keys with the only values that we support; we write the first one."""

    ignored: Sequence[str] = (".rotary_emb.inv_freq",)
    """Suffixes of names of tensors that are not weights."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys of config.json."""


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, Any]:
    """An entry of families.json: what it adds to the entry that it is `like`, if any."""
    own = dict(_tables()[name])
    base = _table(own.pop("like")) if "like" in own else {}
    return base | {key: base[key] | value if key in base else value for key, value in own.items()}


def _family(model_type: str, rules: tuple[Rule, ...]) -> Family:
    """A family of families.json with the rules of its weights."""
    return Family(model_type=model_type, rules=rules, **_table(model_type))


GPT2 = _family("gpt2", GPT2_RULES)
LLAMA = _family("llama", LLAMA_RULES)
MISTRAL = _family("mistral", LLAMA_RULES)
QWEN2 = _family("qwen2", LLAMA_RULES)
QWEN3 = _family("qwen3", LLAMA_RULES)
MIXTRAL = _family("mixtral", _experts("block_sparse_moe", "w1", "w3", "w2"))
QWEN3_MOE = _family("qwen3_moe", _experts("mlp", "gate_proj", "up_proj", "down_proj"))
