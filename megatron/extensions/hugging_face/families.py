"""Hugging Face families: names and layouts of weights, and with families.json the keys of config.json. No torch.

A `Rule` pairs one of our parameters with their tensors. A `Family` has the rules of a `model_type` and maps the keys of
its config.json to our fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One of our parameters and their tensors. `{i}` is the layer number, `{e}` stands for every expert. Of a module of
    multi-token prediction `{i}` is the depth from 0, `{n}` that number counted on from the layers."""

    ours: str
    theirs: tuple[str, ...]
    layout: Any = "Same"
    """How they make up ours: the name of a class in `layouts`, or a `Layout` of your own."""


OUR_LAYER = "decoder.layers.{i}"


def _linear(ours: str, theirs: str, layout: str) -> Iterator[Rule]:
    """Rules of a linear layer's weight and bias; `theirs` lists the names of their parts, separated by spaces."""
    for kind in ("weight", "bias"):
        yield Rule(f"{OUR_LAYER}.{ours}.{kind}", tuple(f"{part}.{kind}" for part in theirs.split()), layout)


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return Rule(f"{ours}.weight", (f"{theirs}.weight",)), Rule(f"{ours}.bias", (f"{theirs}.bias",))


GPT2_RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",), "VocabularyRows"),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *_norm(f"{OUR_LAYER}.input_layernorm", "transformer.h.{i}.ln_1"),
    *_linear("self_attention.linear_qkv", "transformer.h.{i}.attn.c_attn", "JointHeads"),
    *_linear("self_attention.linear_proj", "transformer.h.{i}.attn.c_proj", "Transposed"),
    *_norm(f"{OUR_LAYER}.pre_mlp_layernorm", "transformer.h.{i}.ln_2"),
    *_linear("mlp.linear_fc1", "transformer.h.{i}.mlp.c_fc", "Transposed"),
    *_linear("mlp.linear_fc2", "transformer.h.{i}.mlp.c_proj", "Transposed"),
    *_norm("decoder.final_layernorm", "transformer.ln_f"),
    Rule("output_layer.weight", ("lm_head.weight",), "VocabularyRows"),
)

_HF_LAYER = "model.layers.{i}"
_HEADS = " ".join(f"{_HF_LAYER}.self_attn.{x}_proj" for x in "qkv")
_GATED = f"{_HF_LAYER}.mlp.gate_proj {_HF_LAYER}.mlp.up_proj"

PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
SANDWICH_NORMS = {
    **OUTPUT_NORMS,
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
}
APERTUS_NORMS = {"input_layernorm": "attention_layernorm", "pre_mlp_layernorm": "feedforward_layernorm"}
AFMOE_NORMS = {norm: norm for norm in SANDWICH_NORMS}


def _layer_norms(norms: Mapping[str, str]) -> Iterator[Rule]:
    """Rules of the norms of a layer: ours -> theirs."""
    for ours, theirs in norms.items():
        yield Rule(f"{OUR_LAYER}.{ours}.weight", (f"{_HF_LAYER}.{theirs}.weight",))


def _decoder(norms: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules of Llama and what is like it; `norms` are our norms of a layer and theirs."""
    return (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "VocabularyRows"),
        *_layer_norms(norms),
        *_linear("self_attention.linear_qkv", _HEADS, "QueryGroups"),
        Rule(f"{OUR_LAYER}.self_attention.q_layernorm.weight", (f"{_HF_LAYER}.self_attn.q_norm.weight",)),
        Rule(f"{OUR_LAYER}.self_attention.k_layernorm.weight", (f"{_HF_LAYER}.self_attn.k_norm.weight",)),
        *_linear("self_attention.linear_proj", f"{_HF_LAYER}.self_attn.o_proj", "Same"),
        *_linear("mlp.linear_fc1", _GATED, "Stacked"),
        *_linear("mlp.linear_fc2", f"{_HF_LAYER}.mlp.down_proj", "Same"),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Rule("output_layer.weight", ("lm_head.weight",), "VocabularyRows"),
    )


LLAMA_RULES = _decoder(PRE_NORMS)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of a model with a mixture of experts in every layer."""
    expert = f"{_HF_LAYER}.{block}.experts.{{e}}"
    return (
        *(rule for rule in LLAMA_RULES if ".mlp." not in rule.ours),
        Rule(f"{OUR_LAYER}.mlp.router.weight", (f"{_HF_LAYER}.{block}.gate.weight",)),
        Rule(
            f"{OUR_LAYER}.mlp.experts.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "StackedExperts",
        ),
        Rule(f"{OUR_LAYER}.mlp.experts.linear_fc2.weight", (f"{expert}.{down}.weight",), "Stacked"),
    )


def _joined_experts(block: str, layout: str) -> tuple[Rule, ...]:
    """Rules of the router and the experts of a model that stores all experts of a layer in one tensor, the gates and
    ups as `layout` says."""
    ours, theirs = f"{OUR_LAYER}.mlp", f"{_HF_LAYER}.{block}"
    return (
        Rule(f"{ours}.router.weight", (f"{theirs}.router.weight",)),
        Rule(f"{ours}.router.bias", (f"{theirs}.router.bias",)),
        Rule(f"{ours}.experts.linear_fc1.weight", (f"{theirs}.experts.gate_up_proj",), layout),
        Rule(f"{ours}.experts.linear_fc1.bias", (f"{theirs}.experts.gate_up_proj_bias",), layout),
        Rule(f"{ours}.experts.linear_fc2.weight", (f"{theirs}.experts.down_proj",), "TransposedExperts"),
        Rule(f"{ours}.experts.linear_fc2.bias", (f"{theirs}.experts.down_proj_bias",)),
    )


def _joint(layer: str, attention: str, final: str, head: str) -> tuple[Rule, ...]:
    """Rules of GPT-NeoX and BLOOM, whose heads have their query, key and value side by side in one tensor."""
    return (
        *_norm(f"{OUR_LAYER}.input_layernorm", f"{layer}.input_layernorm"),
        *_linear("self_attention.linear_qkv", f"{layer}.{attention}.query_key_value", "GroupByGroup"),
        *_linear("self_attention.linear_proj", f"{layer}.{attention}.dense", "Same"),
        *_norm(f"{OUR_LAYER}.pre_mlp_layernorm", f"{layer}.post_attention_layernorm"),
        *_linear("mlp.linear_fc1", f"{layer}.mlp.dense_h_to_4h", "Same"),
        *_linear("mlp.linear_fc2", f"{layer}.mlp.dense_4h_to_h", "Same"),
        *_norm("decoder.final_layernorm", final),
        Rule("output_layer.weight", (head,), "VocabularyRows"),
    )


GPT_NEOX_RULES = (
    Rule("embedding.word_embeddings.weight", ("gpt_neox.embed_in.weight",), "VocabularyRows"),
    *_joint("gpt_neox.layers.{i}", "attention", "gpt_neox.final_layer_norm", "embed_out.weight"),
)
BLOOM_RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.word_embeddings.weight",), "VocabularyRows"),
    *_norm("embedding.layernorm", "transformer.word_embeddings_layernorm"),
    *_joint("transformer.h.{i}", "self_attention", "transformer.ln_f", "lm_head.weight"),
)
STARCODER2_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "VocabularyRows"),
    *_norm(f"{OUR_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
    *_linear("self_attention.linear_qkv", _HEADS, "QueryGroups"),
    *_linear("self_attention.linear_proj", f"{_HF_LAYER}.self_attn.o_proj", "Same"),
    *_norm(f"{OUR_LAYER}.pre_mlp_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
    *_linear("mlp.linear_fc1", f"{_HF_LAYER}.mlp.c_fc", "Same"),
    *_linear("mlp.linear_fc2", f"{_HF_LAYER}.mlp.c_proj", "Same"),
    *_norm("decoder.final_layernorm", "model.norm"),
    Rule("output_layer.weight", ("lm_head.weight",), "VocabularyRows"),
)


def _bias(theirs: str) -> Rule:
    """The rule of the bias by which experts are chosen."""
    return Rule(f"{OUR_LAYER}.mlp.router.expert_bias", (f"{_HF_LAYER}.{theirs}",))


def _dense_and_shared(moe: tuple[Rule, ...], bias: str) -> tuple[Rule, ...]:
    """Rules of a model whose first layers are dense, and whose others have shared experts and a bias of experts."""
    shared = f"{_HF_LAYER}.mlp.shared_experts"
    return (
        *moe,
        *(rule for rule in LLAMA_RULES if ".mlp." in rule.ours),
        _bias(bias),
        *_linear("mlp.shared_experts.linear_fc1", f"{shared}.gate_proj {shared}.up_proj", "Stacked"),
        *_linear("mlp.shared_experts.linear_fc2", f"{shared}.down_proj", "Same"),
    )


def _changed(rules: tuple[Rule, ...], *changed: Rule) -> tuple[Rule, ...]:
    """Rules of which some are others."""
    return tuple({rule.ours: rule for rule in (*rules, *changed)}.values())


def _latents(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of DeepSeek: multi-latent attention."""
    ours, theirs = f"{OUR_LAYER}.self_attention", f"{_HF_LAYER}.self_attn"
    pairs = {
        "linear_q_proj": ("q_proj", "Heads"),
        "linear_q_down_proj": ("q_a_proj", "Same"),
        "q_layernorm": ("q_a_layernorm", "Same"),
        "linear_q_up_proj": ("q_b_proj", "Heads"),
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", "Same"),
        "kv_layernorm": ("kv_a_layernorm", "Same"),
        "linear_kv_up_proj": ("kv_b_proj", "Heads"),
        "linear_proj": ("o_proj", "Same"),
    }
    return (
        *(rule for rule in rules if ".self_attention." not in rule.ours),
        *(Rule(f"{ours}.{x}.weight", (f"{theirs}.{y}.weight",), layout) for x, (y, layout) in pairs.items()),
    )


def _delta_nets(moe: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of Qwen3-Next: gated delta nets beside gated attention, and a gated shared expert."""
    ours, theirs = f"{OUR_LAYER}.self_attention", f"{_HF_LAYER}.linear_attn"
    shared = f"{_HF_LAYER}.mlp.shared_expert"
    mixed = (f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight")
    return (
        *(rule for rule in moe if ".linear_qkv." not in rule.ours),
        *_linear("self_attention.linear_qkv", _HEADS, "QueryGatePairs"),
        Rule(f"{ours}.in_proj.weight", mixed, "KeyHeads"),
        Rule(f"{ours}.conv1d.weight", (f"{theirs}.conv1d.weight",), "ConvolvedHeads"),
        *(Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("dt_bias", "A_log")),
        Rule(f"{ours}.out_norm.weight", (f"{theirs}.norm.weight",)),
        Rule(f"{ours}.out_proj.weight", (f"{theirs}.out_proj.weight",)),
        Rule(f"{OUR_LAYER}.mlp.shared_experts.gate_weight", (f"{_HF_LAYER}.mlp.shared_expert_gate.weight",)),
        *_linear("mlp.shared_experts.linear_fc1", f"{shared}.gate_proj {shared}.up_proj", "Stacked"),
        *_linear("mlp.shared_experts.linear_fc2", f"{shared}.down_proj", "Same"),
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

    quantized: Sequence[str] = ()
    """Methods of quantization whose weights are read, by their name in config.json."""

    left_out: Sequence[str] = ()
    """Prefixes of names of tensors of modules that their class does not have either."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys of config.json."""

    spelling: Mapping[str, str] = field(default_factory=dict)
    """Usual name of a key that has rules of its own -> its name in this family's config.json."""

    multi_token: Sequence[Rule] = ()
    """Rules of the modules of multi-token prediction, where their files have them."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """Their names of further tensors of such a module -> our parameter that they are copies of."""

    multi_token_key: str | None = None
    """Key with the number of these modules."""

    unwritten: Sequence[str] = ()
    """Keys that only say how a config.json without newer keys is read."""

    window_groups: int = 1
    """Key/value heads of a layer with a sliding window, for each one of other layers."""

    earlier_tokens: str | None = None
    """Key with the earlier tokens in a sliding window, where that is given: one less than --window-size."""

    rotary_layers: str = "all"
    """Layers with a rotary embedding: "all", those with sliding "windows", or these "windows, if any" are there."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Key -> the key whose value it must have, where it is given."""

    same: Mapping[str, str] = field(default_factory=dict)
    """Field of TransformerConfig -> the field whose value it has."""

    inverse_roots: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json -> field of TransformerConfig that is 1 / sqrt of its value."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key of config.json -> its values, the only ones that we support -> those of our field. Of several with the same
    meaning we write the first one."""


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, Any]:
    """An entry of families.json: what it adds to the entry that it is `like`, if any."""
    own = dict(_tables()[name])
    base = _table(own.pop("like")) if "like" in own else {}
    return base | {key: base[key] | value if key in base else value for key, value in own.items()}


def missing_feature(model_type: object) -> str | None:
    """What a family needs that our layers do not have; None for one that is not known to need anything."""
    return _tables()["not expressible"].get(model_type) if isinstance(model_type, str) else None


def _family(model_type: str, rules: tuple[Rule, ...], **multi_token: Any) -> Family:
    """A family of families.json with the rules of its weights, and of its modules of multi-token prediction."""
    table = _table(model_type)
    booleans = {"true": True, "false": False}  # JSON has texts only as keys
    for key, values in table.get("values", {}).items():
        table["values"][key] = {booleans.get(theirs, theirs): ours for theirs, ours in values.items()}
    return Family(model_type=model_type, rules=rules, **multi_token, **table)


OUR_MODULE = "mtp.layers.{i}"
COPIES = {
    "model.layers.{n}.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.layers.{n}.shared_head.head.weight": "output_layer.weight",
}
"""DeepSeek stores embedding and head in each module once more."""


def _multi_token(rules: tuple[Rule, ...], layer: str, parts: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules of modules of multi-token prediction: those of `rules` for their layer, whose names of theirs begin with
    `layer`, and those of its other `parts`, ours -> theirs."""
    inside = (
        Rule(
            rule.ours.replace(OUR_LAYER, f"{OUR_MODULE}.transformer_layer"),
            tuple(name.replace(_HF_LAYER, layer) for name in rule.theirs),
            rule.layout,
        )
        for rule in rules
        if rule.ours.startswith(OUR_LAYER)
    )
    around = (Rule(f"{OUR_MODULE}.{ours}.weight", (f"{theirs}.weight",)) for ours, theirs in parts.items())
    return (*inside, *around)


def _further_layers(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Modules that DeepSeek counts on from the layers."""
    layer = "model.layers.{n}"
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    return _multi_token(rules, layer, {ours: f"{layer}.{theirs}" for ours, theirs in parts.items()})


GPT2 = _family("gpt2", GPT2_RULES)
LLAMA = _family("llama", LLAMA_RULES)
MISTRAL = _family("mistral", LLAMA_RULES)
QWEN2 = _family("qwen2", LLAMA_RULES)
QWEN3 = _family("qwen3", LLAMA_RULES)
SMOLLM3 = _family("smollm3", LLAMA_RULES)
MIXTRAL = _family("mixtral", _experts("block_sparse_moe", "w1", "w3", "w2"))
QWEN3_MOE = _family("qwen3_moe", _experts("mlp", "gate_proj", "up_proj", "down_proj"))
GEMMA = _family("gemma", LLAMA_RULES)
GEMMA2 = _family("gemma2", _decoder(SANDWICH_NORMS))
GEMMA3 = _family("gemma3_text", _decoder(SANDWICH_NORMS))
GRANITE = _family("granite", LLAMA_RULES)
OLMO2 = _family("olmo2", _decoder(OUTPUT_NORMS))
OLMO3 = _family("olmo3", _decoder(OUTPUT_NORMS))
OLMOE = _family("olmoe", _experts("mlp", "gate_proj", "up_proj", "down_proj"))
STARCODER2 = _family("starcoder2", STARCODER2_RULES)
GPT_NEOX = _family("gpt_neox", GPT_NEOX_RULES)
BLOOM = _family("bloom", BLOOM_RULES)
_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED = _dense_and_shared(_EXPERTS, "mlp.gate.e_score_correction_bias")
DEEPSEEK_V2 = _family("deepseek_v2", _latents(_SHARED))
DEEPSEEK_V3 = _family("deepseek_v3", _latents(_SHARED), multi_token=_further_layers(_latents(_SHARED)), copies=COPIES)
GLM4_MOE = _family("glm4_moe", _SHARED, multi_token=_further_layers(_SHARED), copies=COPIES)
_GROUPS = Rule(
    f"{OUR_LAYER}.self_attention.linear_qkv.weight",
    tuple(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
    "RowsOfGroups",
)
MIMO_V2_FLASH = _family(
    "mimo_v2_flash",
    _changed(
        _SHARED,
        _GROUPS,
        Rule(f"{OUR_LAYER}.self_attention.core.softmax_offset", (f"{_HF_LAYER}.self_attn.attention_sink_bias",)),
    ),
)
STEP3P5 = _family(
    "step3p5",
    _changed(
        _decoder(PRE_NORMS),
        replace(_GROUPS, theirs=tuple(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in "qgkv")),
        Rule(f"{OUR_LAYER}.mlp.router.weight", (f"{_HF_LAYER}.moe.gate.weight",)),
        _bias("moe.router_bias"),
        Rule(
            f"{OUR_LAYER}.mlp.experts.linear_fc1.weight",
            (f"{_HF_LAYER}.moe.gate_proj.weight", f"{_HF_LAYER}.moe.up_proj.weight"),
            "StackedHalves",
        ),
        Rule(f"{OUR_LAYER}.mlp.experts.linear_fc2.weight", (f"{_HF_LAYER}.moe.down_proj.weight",)),
        *_linear(
            "mlp.shared_experts.linear_fc1",
            f"{_HF_LAYER}.share_expert.gate_proj {_HF_LAYER}.share_expert.up_proj",
            "Stacked",
        ),
        *_linear("mlp.shared_experts.linear_fc2", f"{_HF_LAYER}.share_expert.down_proj", "Same"),
    ),
)
EXAONE4 = _family("exaone4", _decoder(OUTPUT_NORMS))
EXAONE_MOE = _family("exaone_moe", _dense_and_shared(_EXPERTS, "mlp.e_score_correction_bias"))
MINIMAX_M2 = _family(
    "minimax_m2",
    (*_experts("block_sparse_moe", "w1", "w3", "w2"), _bias("block_sparse_moe.e_score_correction_bias")),
)
AFMOE = _family(
    "afmoe",
    _changed(
        _dense_and_shared(_EXPERTS, "mlp.expert_bias"),
        *_layer_norms(AFMOE_NORMS),
        Rule(f"{OUR_LAYER}.mlp.router.weight", (f"{_HF_LAYER}.mlp.router.gate.weight",)),
        Rule(
            f"{OUR_LAYER}.self_attention.linear_qkv.weight",
            tuple(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in ("q", "gate", "k", "v")),
            "GatedQueryGroups",
        ),
    ),
)
GPT_OSS = _family(
    "gpt_oss",
    (
        *(rule for rule in LLAMA_RULES if ".mlp." not in rule.ours),
        *_joined_experts("mlp", "InterleavedGateUpColumns"),
        Rule(f"{OUR_LAYER}.self_attention.core.softmax_offset", (f"{_HF_LAYER}.self_attn.sinks",)),
    ),
)
_LLAMA4_DENSE, _LLAMA4_SHARED = (f"{_HF_LAYER}.feed_forward{part}" for part in ("", ".shared_expert"))
LLAMA4 = _family(
    "llama4_text",
    (
        *(rule for rule in LLAMA_RULES if ".mlp." not in rule.ours),
        *_joined_experts("feed_forward", "GateUpColumns"),
        *(
            rule
            for ours, theirs in (("mlp", _LLAMA4_DENSE), ("mlp.shared_experts", _LLAMA4_SHARED))
            for rule in (
                *_linear(f"{ours}.linear_fc1", f"{theirs}.gate_proj {theirs}.up_proj", "Stacked"),
                *_linear(f"{ours}.linear_fc2", f"{theirs}.down_proj", "Same"),
            )
        ),
    ),
)
QWEN3_NEXT = _family(
    "qwen3_next",
    _delta_nets(_EXPERTS),
    multi_token=_multi_token(
        _delta_nets(_EXPERTS),
        "mtp.layers.{i}",
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "final_layernorm": "mtp.norm",
        },
    ),
)
APERTUS = _family(
    "apertus",
    (
        *(rule for rule in _decoder(APERTUS_NORMS) if ".mlp." not in rule.ours),
        *_linear("mlp.linear_fc1", f"{_HF_LAYER}.mlp.up_proj", "Same"),
        *_linear("mlp.linear_fc2", f"{_HF_LAYER}.mlp.down_proj", "Same"),
        Rule(f"{OUR_LAYER}.mlp.activation.alpha_p", (f"{_HF_LAYER}.mlp.act_fn.alpha_p",)),
        Rule(
            f"{OUR_LAYER}.mlp.activation.alpha_n",
            tuple(f"{_HF_LAYER}.mlp.act_fn.{part}" for part in ("alpha_n", "beta", "eps")),
            "WithConstantsOfXIELU",
        ),
    ),
)
BAILING_MOE = _family(
    "bailing_moe",
    _changed(
        _dense_and_shared(_EXPERTS, "mlp.gate.expert_bias"),
        Rule("embedding.word_embeddings.weight", ("model.word_embeddings.weight",), "VocabularyRows"),
        *_linear("self_attention.linear_qkv", f"{_HF_LAYER}.attention.query_key_value", "JoinedQueryGroups"),
        *_linear("self_attention.linear_proj", f"{_HF_LAYER}.attention.dense", "Same"),
        Rule(f"{OUR_LAYER}.self_attention.q_layernorm.weight", (f"{_HF_LAYER}.attention.query_layernorm.weight",)),
        Rule(f"{OUR_LAYER}.self_attention.k_layernorm.weight", (f"{_HF_LAYER}.attention.key_layernorm.weight",)),
    ),
)
