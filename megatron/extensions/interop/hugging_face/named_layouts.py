"""Layouts that Hugging Face family files can select by name, grouped by subject.

For example, `"QueryGroups: .q_proj.weight .k_proj.weight .v_proj.weight"` in a family's weights table selects the
layout QueryGroups. Comments list the families that use a layout, and show tensor shapes that are not obvious. A bias
uses the same layout as the weight of its linear layer, but lacks the weight's last dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.layouts import (
    HeadsOfGroups,
    Layout,
    OneOfThree,
    PartOfLayer,
    Pieces,
    Reordered,
    RowsOfEachHead,
    StackedExperts,
    VocabularyRows,
    WithConstantsOfXIELU,
)

ROWS = "(g n) ... -> g n ..."
"""Pattern for rows that are stored group by group in one dim. In the parameter, the groups are a separate dim."""

HEADS = "(g n d) ... -> g n d ..."
"""Pattern for rows that are stored group by group and, within a group, head by head. Each head has d channels."""

TAPS = "(g n) 1 t -> g n t"
"""Pattern for the taps of convolutions, [channels, 1, taps], whose channels are stored group by group."""


def option(config: TransformerConfig, name: str) -> int:
    """Return the value of the flag `name`, which an extension defines."""
    return next(getattr(each, name) for each in config.extension_options if hasattr(each, name))


WHOLE_TENSORS: dict[str, Layout] = {
    "Same": Pieces(),
    "VocabularyRows": VocabularyRows(),
    # GPT-2's linear weights are [in, out]. The parameters are [out, in].
    "Transposed": Pieces("... o -> o ..."),
    # Tensors of the same shape, such as the gate and up projections of a gated MLP, are stacked along a new first dim.
    "Stacked": Pieces("... -> 1 ...", joined=0),
    # LFM2's short convolution: one tensor contains three consecutive projections of the same width.
    "Thirds": Pieces("(third c) ... -> third c ...", lambda config: {"third": 3}),
    # DeepSeek-V4's hyper-connections: the three elements of a Hugging Face tensor are separate parameters here.
    "FirstOfThree": OneOfThree(0),
    "SecondOfThree": OneOfThree(1),
    "ThirdOfThree": OneOfThree(2),
    "WithConstantsOfXIELU": WithConstantsOfXIELU(),
    # Gemma 4's per-layer embeddings: one tensor contains the rows or columns of all layers
    "RowsOfLayer": PartOfLayer(0),
    "ColumnsOfLayer": PartOfLayer(1),
}

PAIR = "pair"
"""Name of the pattern axis of size 2 that contains the gate and up projections of a gated MLP, in this order."""


def _gate_and_up(config: TransformerConfig) -> Mapping[str, int]:
    return {PAIR: 2}


MLPS_AND_EXPERTS: dict[str, Layout] = {
    # Phi 3, GLM: one tensor [2 * ffn, h] contains all gate rows, then all up rows. Granite's MoE layers: one tensor
    # [experts, 2 * ffn, h] contains the rows of all experts, in the same order.
    "GateUpRows": Pieces("(pair o) ... -> pair o ...", _gate_and_up),
    "ExpertGateUpRows": Pieces("e (pair o) ... -> e pair o ...", _gate_and_up),
    # Mixtral: the gate and up weights of each expert are two separate tensors. The parameter is [experts, 2, ffn, h].
    "StackedExperts": StackedExperts(),
    # One tensor [experts, ffn, h] contains the gate weights of all experts, and another one contains the up weights.
    "StackedHalves": Pieces("e ... -> e 1 ...", joined=1),
    # One tensor [experts, h, 2 * ffn] contains the gate and up weights of all experts. In Llama 4, all gate columns
    # precede all up columns; in gpt-oss, gate and up columns alternate.
    "GateUpColumns": Pieces("e ... o -> e 1 o ...", joined=1, counts=lambda config: (1, 1), section=-1),
    "InterleavedGateUpColumns": Pieces("e ... (o pair) -> e pair o ...", _gate_and_up),
    "TransposedExperts": Pieces("e i o -> e o i"),
    # DBRX: three tensors [experts * ffn, h] contain all gates, all ups, and all down projections.
    "RowsOfExperts": Pieces("(e o) ... -> e 1 o ...", lambda config: {"e": config.num_experts or 1}, 1),
    "TransposedRowsOfExperts": Pieces("(e i) o -> e o i", lambda config: {"e": config.num_experts or 1}),
    "RowOfExperts": Pieces("1 e -> e"),
}


def _query_groups(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": config.query_groups, "d": config.head_dim, PAIR: 2}


def _pairs_of_groups(config: TransformerConfig) -> Mapping[str, int]:
    return {"two": 2, "p": config.query_groups // 2, "d": config.head_dim}


def _attention_heads(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": config.num_attention_heads}


def _of_group(*tensors: str) -> Callable[[TransformerConfig], list[int]]:
    """Return a function that returns the number of heads per query group in each of `tensors`. A tensor "q" contains
    all query heads of the group, a tensor "pairs" contains twice as many heads, and any other tensor contains one
    head."""
    numbers = {"q": 1, "pairs": 2}
    return lambda config: [numbers.get(each, 0) * config.queries_per_group or 1 for each in tensors]


def _with_swapped_halves(config: TransformerConfig) -> list[int]:
    """Return the channel order that swaps the first and the second half of a head."""
    return [(at + config.head_dim // 2) % config.head_dim for at in range(config.head_dim)]


QUERIES_KEYS_VALUES = Pieces(HEADS, _query_groups, 1, _of_group("q", "k", "v"))
"""Layout of the merged attention projection. The Hugging Face tensors are q [heads * d, ...], k [groups * d, ...] and v
[groups * d, ...]. The parameter is [groups, queries per group + 2, d, ...]."""

ATTENTION: dict[str, Layout] = {
    "QueryGroups": QUERIES_KEYS_VALUES,
    "QueriesOfGroups": Pieces(HEADS, _query_groups, 1, _of_group("q")),
    "QueryGroupsWithoutValues": Pieces(HEADS, _query_groups, 1, _of_group("q", "k")),
    # Four tensors: queries, output gates of the same shape, keys and values.
    "GatedQueryGroups": Pieces(HEADS, _query_groups, 1, _of_group("q", "q", "k", "v")),
    # Qwen3-Next: one tensor [heads * 2 * d, ...] contains each head's query and gate; keys and values are separate
    # tensors.
    "QueryGatePairs": Pieces(
        ("(g q pair d) ... -> g (pair q) d ...", HEADS, HEADS), _query_groups, 1, _of_group("pairs", "k", "v")
    ),
    # MiMo-V2-Flash, Step 3.5, Laguna: queries, keys, values and, in some models, gates are separate tensors. The widths
    # of query, key and value heads may differ
    "RowsOfGroups": HeadsOfGroups(
        even=Pieces(HEADS, _query_groups, 1, lambda config: [count for count in config.head_counts if count]),
        uneven=Pieces(
            ROWS,
            lambda config: {"g": config.query_groups},
            1,
            lambda config: [rows for rows in config.group_rows if rows],
        ),
    ),
    # Ling: one tensor with all query rows, then all key rows, then all value rows
    "JoinedQueryGroups": Pieces(HEADS, _query_groups, 1, _of_group("q", "k", "v"), section=0),
    # GPT-2: one tensor contains all queries, then all keys, then all values along the last dim, which is the only dim
    # of a bias
    "JointHeads": Pieces("... (g n d) -> g n d ...", _query_groups, 1, _of_group("q", "k", "v"), section=-1),
    # BLOOM, GPT-NeoX: each head's query, key and value are adjacent, in the same order as in the parameter
    "GroupByGroup": Pieces(HEADS, _query_groups),
    # CodeGen: one tensor contains four blocks of heads. Each block contains the queries of all its heads, then the
    # values, then the keys
    "BlocksOfHeads": Reordered(
        Pieces("(m p n d) ... -> (m n) p d ...", lambda config: {"m": 4, "p": 3, "d": config.head_dim}),
        1,
        lambda config: [0, 2, 1],
    ),
    # nanochat's rotary embedding rotates in the opposite direction, which swaps the halves of queries and keys
    "SwappedQueryGroups": Reordered(QUERIES_KEYS_VALUES, 2, _with_swapped_halves, but_values=True),
    # DiffLlama: the query groups are divided into two halves; group p of the first half and group p of the second half
    # form a pair
    "PairsOfGroups": Pieces("(two p n d) ... -> p two n d ...", _pairs_of_groups, 2, _of_group("q", "k", "v")),
    "Heads": Pieces("(g d) ... -> g d ...", _attention_heads),
    # A.X K2: one tensor contains each head's query rows and then its gate rows, which are two parameters here
    "QueriesBesideGates": RowsOfEachHead(lambda config: (0, config.head_dim, config.value_head_dim)),
    "GatesBesideQueries": RowsOfEachHead(lambda config: (config.head_dim, config.value_head_dim, 0)),
    # MiniMax's lightning attention: one tensor contains each head's query, key and value; another contains its gate
    "HeadsAndGates": Pieces(ROWS, _attention_heads, 1, lambda config: (3 * config.head_dim, config.head_dim)),
    # DeepSeek-V4: one tensor [groups * rank, channels of a group] contains the output projections of all head groups.
    "OutputGroups": Pieces("(g r) ... -> g r ...", lambda config: {"g": option(config, "o_groups")}),
}


def _pairs_of_halves(first: int, rotated: int) -> list[int]:
    """Return a channel order in which channels that are rotated together are adjacent. The first `first` channels stay
    in place, and the two halves of the next `rotated` channels are interleaved."""
    return [*range(first), *(first + half + at for at in range(rotated // 2) for half in (0, rotated // 2))]


def _head_channels(config: TransformerConfig) -> list[int]:
    return _pairs_of_halves(config.head_dim - config.rotary_dim, config.rotary_dim)


def _latent_channels(config: TransformerConfig) -> list[int]:
    return _pairs_of_halves(option(config, "kv_lora_rank"), config.rotary_dim)


def _indexer_key_channels(config: TransformerConfig) -> list[int]:
    rotated = config.rotary_dim
    return [*_pairs_of_halves(0, rotated), *range(rotated, option(config, "dsa_indexer_head_dim"))]


def _indexer_channels(config: TransformerConfig) -> list[int]:
    of_head = _indexer_key_channels(config)
    return [len(of_head) * head + at for head in range(option(config, "dsa_indexer_n_heads")) for at in of_head]


# In the parameter, channels that are rotated together are adjacent. In the Hugging Face tensor, channel i of the first
# half of the rotated channels is rotated together with channel i of the second half.
ROTATED_HALVES: dict[str, Layout] = {
    # MiniCPM 3: the last channels of each head and of the key/value latent are rotated
    "HeadsOfHalves": Reordered(Pieces("(g d) ... -> g d ...", _attention_heads), 1, _head_channels),
    "LatentOfHalves": Reordered(Pieces(), 0, _latent_channels),
    # DeepSeek-V3.2: the first channels of the indexer's heads and of the indexer's key are rotated
    "IndexerHeadsOfHalves": Reordered(Pieces(), 0, _indexer_channels),
    "IndexerKeyOfHalves": Reordered(Pieces(), 0, _indexer_key_channels),
}


class DeltaNets(Protocol):
    """Options that define the numbers and widths of heads in gated delta nets."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_channels: tuple[int, ...]


def delta_nets(config: TransformerConfig) -> DeltaNets:
    """Return the configuration options of gated delta nets, such as the number of key heads. The extension that
    implements gated delta nets defines these options."""
    found: DeltaNets = next(each for each in config.extension_options if hasattr(each, "linear_num_key_heads"))
    return found


def _key_heads(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": delta_nets(config).linear_num_key_heads}


def _of_key_head(config: TransformerConfig) -> tuple[int, ...]:
    """Return the number of rows per key head for queries, keys, values, gates, betas (writing strengths) and decays."""
    return delta_nets(config).linear_channels


def _convolved_of_key_head(config: TransformerConfig) -> tuple[int, ...]:
    return _of_key_head(config)[:3]


def _of_key_head_in_two(config: TransformerConfig) -> tuple[int, int]:
    *projected, beta, decay = _of_key_head(config)
    return sum(projected), beta + decay


DELTA_NETS: dict[str, Layout] = {
    # Qwen3-Next: one tensor contains each key head's queries, keys, values and gates; another contains its betas
    # (writing strengths) and decays
    "KeyHeads": Pieces(ROWS, _key_heads, 1, _of_key_head_in_two),
    # Qwen3.5: one tensor contains the queries of all heads, then the keys, then the values; the gates, the betas
    # (writing strengths) and the decays are three more tensors
    "KeyHeadsApart": Pieces(ROWS, _key_heads, 1, _of_key_head, section=0, sections=3),
    # Olmo Hybrid: queries, keys, values, gates, betas and decays are separate tensors; queries, keys and values also
    # have convolutions
    "KeyHeadsOfEach": Pieces(ROWS, _key_heads, 1, _of_key_head),
    "ConvolutionsOfEach": Pieces(TAPS, _key_heads, 1, _convolved_of_key_head, may_be_thirds=True),
    # one convolution tensor contains the channels of all queries, then all keys, then all values
    "ConvolvedHeads": Pieces(TAPS, _key_heads, 1, _convolved_of_key_head, section=0),
}


def _kimi_heads(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": option(config, "kda_num_heads")}


def _convolved_of_kimi_head(config: TransformerConfig) -> tuple[int, int, int]:
    width = option(config, "kda_head_dim")
    return width, width, width


KIMI_DELTA_ATTENTION: dict[str, Layout] = {
    # Queries, keys, values and betas (writing strengths) are separate tensors. Queries, keys and values also have
    # convolutions.
    "KimiHeads": Pieces(ROWS, _kimi_heads, 1, lambda config: (*_convolved_of_kimi_head(config), 1)),
    "KimiConvolutions": Pieces(TAPS, _kimi_heads, 1, _convolved_of_kimi_head),
    # Low-rank projections have one row for each channel of each head. There is one decay per head.
    "KimiRows": Pieces("(g d) ... -> g d ...", _kimi_heads),
    "KimiDecays": Pieces("1 1 g 1 -> g"),
}


def _mamba_groups(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": option(config, "mamba_num_groups")}


def mamba_channels(config: TransformerConfig) -> tuple[int, int, int, int, int]:
    """Return how many rows of gates, inputs, B, C and step sizes each group has in Mamba-2's input projection. The
    numbers are computed from the options of the extension that implements Mamba-2.
    """
    channels, states = option(config, "mamba_head_dim"), option(config, "mamba_state_dim")
    all_heads = option(config, "mamba_num_heads") or 2 * config.hidden_size // channels
    heads = all_heads // option(config, "mamba_num_groups")
    width = heads * channels
    return width, width, states, states, heads


def _convolved_of_mamba_group(config: TransformerConfig) -> tuple[int, ...]:
    return mamba_channels(config)[1:4]


MAMBA: dict[str, Layout] = {
    # Mamba-2: one tensor contains the gates of all groups, then all inputs, B, C and step sizes. Inputs, B and C have
    # convolutions with biases.
    "GroupsOfHeads": Pieces(ROWS, _mamba_groups, 1, mamba_channels, section=0),
    "ConvolvedGroups": Pieces(TAPS, _mamba_groups, 1, _convolved_of_mamba_group, section=0),
    "GroupsOfBiases": Pieces("(g n) -> g n", _mamba_groups, 1, _convolved_of_mamba_group, section=0),
    # Mamba-1: Hugging Face stores the decays as [channels, states], and the parameter is this matrix flattened to 1-D
    "FlatStates": Pieces("c n -> (c n)", lambda config: {"n": option(config, "mamba1_state_dim")}),
}

LAYOUTS: dict[str, Layout] = {
    **WHOLE_TENSORS,
    **MLPS_AND_EXPERTS,
    **ATTENTION,
    **ROTATED_HALVES,
    **DELTA_NETS,
    **KIMI_DELTA_ATTENTION,
    **MAMBA,
}
"""All layouts that family files can select, keyed by name."""
