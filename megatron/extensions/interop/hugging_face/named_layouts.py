"""The layouts that the files of Hugging Face families name, by subject.

`"QueryGroups: .q_proj.weight .k_proj.weight .v_proj.weight"` in a family's table of weights names one of them. The
comments give the families that a layout is for, and the shapes of their tensors where those do not follow from it. A
weight and its bias share a layout: the bias has only the first dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.layouts import (
    HeadsOfGroups,
    Layout,
    OneOfThree,
    Pieces,
    Reordered,
    StackedExperts,
    VocabularyRows,
    WithConstantsOfXIELU,
)

ROWS = "(g n) ... -> g n ..."
"""Rows of groups, one group after the other: ours has a dim of its own for the groups."""

HEADS = "(g n d) ... -> g n d ..."
"""The same for groups of heads of d channels."""

TAPS = "(g n) 1 t -> g n t"
"""The same for the taps of convolutions, [channels, 1, taps]."""


def option(config: TransformerConfig, name: str) -> int:
    """The value of a flag of whichever extension states it."""
    return next(getattr(each, name) for each in config.extension_options if hasattr(each, name))


WHOLE_TENSORS: dict[str, Layout] = {
    "Same": Pieces(),
    "VocabularyRows": VocabularyRows(),
    # GPT-2's linear layers are [in, out], ours are [out, in].
    "Transposed": Pieces("... o -> o ..."),
    # Several tensors of one shape, such as gate and up of a gated MLP, along a new first dim of ours.
    "Stacked": Pieces("... -> 1 ...", joined=0),
    # LFM2's short convolution: three projections of one width, one after another.
    "Thirds": Pieces("(third c) ... -> third c ...", lambda config: {"third": 3}),
    # DeepSeek-V4's hyper-connections: three of our factors are one tensor of theirs.
    "FirstOfThree": OneOfThree(0),
    "SecondOfThree": OneOfThree(1),
    "ThirdOfThree": OneOfThree(2),
    "WithConstantsOfXIELU": WithConstantsOfXIELU(),
}

PAIR = "pair"
"""The axis of gate and up of a gated MLP, in this order."""


def _gate_and_up(config: TransformerConfig) -> Mapping[str, int]:
    return {PAIR: 2}


MLPS_AND_EXPERTS: dict[str, Layout] = {
    # Phi 3, GLM: [2 * ffn, h], all gates before all ups. Granite's experts have the same with a dim of experts.
    "GateUpRows": Pieces("(pair o) ... -> pair o ...", _gate_and_up),
    "ExpertGateUpRows": Pieces("e (pair o) ... -> e pair o ...", _gate_and_up),
    # Mixtral: two tensors for each expert. Ours has [experts, 2, ffn, h].
    "StackedExperts": StackedExperts(),
    # A tensor [experts, ffn, h] of all gates and another one of all ups.
    "StackedHalves": Pieces("e ... -> e 1 ...", joined=1),
    # [experts, h, 2 * ffn]: Llama 4 has all gates before all ups, gpt-oss has each gate before its up.
    "GateUpColumns": Pieces("e ... o -> e 1 o ...", joined=1, counts=lambda config: (1, 1), section=-1),
    "InterleavedGateUpColumns": Pieces("e ... (o pair) -> e pair o ...", _gate_and_up),
    "TransposedExperts": Pieces("e i o -> e o i"),
    # DBRX: one matrix [experts * ffn, h] of all gates, another one of all ups, and a third one [experts * ffn, h].
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
    """Heads of a query group in each of their tensors: those of all queries ("q"), twice as many ("pairs"), or one."""
    numbers = {"q": 1, "pairs": 2}
    return lambda config: [numbers.get(each, 0) * config.queries_per_group or 1 for each in tensors]


def _with_swapped_halves(config: TransformerConfig) -> list[int]:
    """For each channel of a head the one that is half a head away."""
    return [(at + config.head_dim // 2) % config.head_dim for at in range(config.head_dim)]


QUERIES_KEYS_VALUES = Pieces(HEADS, _query_groups, 1, _of_group("q", "k", "v"))
"""q [heads * d, ...], k and v [groups * d, ...] as ours, [groups, queries of a group + 2, d, ...]."""

ATTENTION: dict[str, Layout] = {
    "QueryGroups": QUERIES_KEYS_VALUES,
    "QueryGroupsWithoutValues": Pieces(HEADS, _query_groups, 1, _of_group("q", "k")),
    # Two tensors of the queries' shape, the second one for the gates of outputs, then keys and values.
    "GatedQueryGroups": Pieces(HEADS, _query_groups, 1, _of_group("q", "q", "k", "v")),
    # Qwen3-Next: [heads * 2 * d, ...] with each head's query before its gate, then keys and values.
    "QueryGatePairs": Pieces(
        ("(g q pair d) ... -> g (pair q) d ...", HEADS, HEADS), _query_groups, 1, _of_group("pairs", "k", "v")
    ),
    # MiMo-V2-Flash, Step 3.5, Laguna: queries, gates if there are any, keys and values; heads may differ in width.
    "RowsOfGroups": HeadsOfGroups(
        even=Pieces(HEADS, _query_groups, 1, lambda config: [count for count in config.head_counts if count]),
        uneven=Pieces(
            ROWS,
            lambda config: {"g": config.query_groups},
            1,
            lambda config: [rows for rows in config.group_rows if rows],
        ),
    ),
    # Ling: one tensor with the rows of all queries, then those of all keys, then those of all values.
    "JoinedQueryGroups": Pieces(HEADS, _query_groups, 1, _of_group("q", "k", "v"), section=0),
    # GPT-2: the same along the last dim, which is the only one of a bias.
    "JointHeads": Pieces("... (g n d) -> g n d ...", _query_groups, 1, _of_group("q", "k", "v"), section=-1),
    # BLOOM, GPT-NeoX: query, key and value head by head, which is our order.
    "GroupByGroup": Pieces(HEADS, _query_groups),
    # CodeGen: four blocks of heads, each with all of its queries, then all values, then all keys.
    "BlocksOfHeads": Reordered(
        Pieces("(m p n d) ... -> (m n) p d ...", lambda config: {"m": 4, "p": 3, "d": config.head_dim}),
        1,
        lambda config: [0, 2, 1],
    ),
    # nanochat rotates in the other direction, so that the halves of queries and keys change places.
    "SwappedQueryGroups": Reordered(QUERIES_KEYS_VALUES, 2, _with_swapped_halves, but_values=True),
    # DiffLlama: the group half of all groups behind a group is the other one of its pair.
    "PairsOfGroups": Pieces("(two p n d) ... -> p two n d ...", _pairs_of_groups, 2, _of_group("q", "k", "v")),
    "Heads": Pieces("(g d) ... -> g d ...", _attention_heads),
    # MiniMax's lightning attention: query, key and value of each head in one tensor, its gate in another.
    "HeadsAndGates": Pieces(ROWS, _attention_heads, 1, lambda config: (3 * config.head_dim, config.head_dim)),
    # DeepSeek-V4: outputs of groups of heads, [groups * rank, channels of a group].
    "OutputGroups": Pieces("(g r) ... -> g r ...", lambda config: {"g": option(config, "o_groups")}),
}


def _pairs_of_halves(first: int, rotated: int) -> list[int]:
    """`first` channels as they are, then those of two halves as the pairs that rotate together."""
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


# Channels that rotate together are pairs here, and lie half the rotated channels apart there.
ROTATED_HALVES: dict[str, Layout] = {
    # MiniCPM 3: the last channels of each head, and of the latent of keys and values.
    "HeadsOfHalves": Reordered(Pieces("(g d) ... -> g d ...", _attention_heads), 1, _head_channels),
    "LatentOfHalves": Reordered(Pieces(), 0, _latent_channels),
    # DeepSeek-V3.2: the first channels of the indexer's heads, and of its key.
    "IndexerHeadsOfHalves": Reordered(Pieces(), 0, _indexer_channels),
    "IndexerKeyOfHalves": Reordered(Pieces(), 0, _indexer_key_channels),
}


class DeltaNets(Protocol):
    """The shape of gated delta nets."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_channels: tuple[int, ...]


def delta_nets(config: TransformerConfig) -> DeltaNets:
    """The shape of gated delta nets: options of whichever extension states their heads."""
    found: DeltaNets = next(each for each in config.extension_options if hasattr(each, "linear_num_key_heads"))
    return found


def _key_heads(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": delta_nets(config).linear_num_key_heads}


def _of_key_head(config: TransformerConfig) -> tuple[int, ...]:
    """Rows of a key head: queries, keys, values, gates, writing strengths, decays."""
    return delta_nets(config).linear_channels


def _convolved_of_key_head(config: TransformerConfig) -> tuple[int, ...]:
    return _of_key_head(config)[:3]


def _of_key_head_in_two(config: TransformerConfig) -> tuple[int, int]:
    *projected, beta, decay = _of_key_head(config)
    return sum(projected), beta + decay


DELTA_NETS: dict[str, Layout] = {
    # Qwen3-Next: two tensors, each with all rows of a key head together.
    "KeyHeads": Pieces(ROWS, _key_heads, 1, _of_key_head_in_two),
    # Qwen3.5: one tensor with the rows of all queries, then all keys, then all values, and three more.
    "KeyHeadsApart": Pieces(ROWS, _key_heads, 1, _of_key_head, section=0, sections=3),
    # Olmo Hybrid: six tensors, and a convolution for each of the first three.
    "KeyHeadsOfEach": Pieces(ROWS, _key_heads, 1, _of_key_head),
    "ConvolutionsOfEach": Pieces(TAPS, _key_heads, 1, _convolved_of_key_head, may_be_thirds=True),
    # One convolution of all queries, then all keys, then all values.
    "ConvolvedHeads": Pieces(TAPS, _key_heads, 1, _convolved_of_key_head, section=0),
}


def _kimi_heads(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": option(config, "kda_num_heads")}


def _convolved_of_kimi_head(config: TransformerConfig) -> tuple[int, int, int]:
    width = option(config, "kda_head_dim")
    return width, width, width


KIMI_DELTA_ATTENTION: dict[str, Layout] = {
    # Four tensors: query, key, value and writing strength of each head; and convolutions of the first three.
    "KimiHeads": Pieces(ROWS, _kimi_heads, 1, lambda config: (*_convolved_of_kimi_head(config), 1)),
    "KimiConvolutions": Pieces(TAPS, _kimi_heads, 1, _convolved_of_kimi_head),
    # Low-rank projections to the channels of all heads, and a decay for each head.
    "KimiRows": Pieces("(g d) ... -> g d ...", _kimi_heads),
    "KimiDecays": Pieces("1 1 g 1 -> g"),
}


def _mamba_groups(config: TransformerConfig) -> Mapping[str, int]:
    return {"g": option(config, "mamba_num_groups")}


def mamba_channels(config: TransformerConfig) -> tuple[int, int, int, int, int]:
    """Rows of a group in the projection of Mamba-2: gates, inputs, B, C and step sizes. Its shape is options of
    whichever extension states it."""
    channels, states = option(config, "mamba_head_dim"), option(config, "mamba_state_dim")
    all_heads = option(config, "mamba_num_heads") or 2 * config.hidden_size // channels
    heads = all_heads // option(config, "mamba_num_groups")
    width = heads * channels
    return width, width, states, states, heads


def _convolved_of_mamba_group(config: TransformerConfig) -> tuple[int, ...]:
    return mamba_channels(config)[1:4]


MAMBA: dict[str, Layout] = {
    # Mamba-2: one tensor with the gates of all groups, then all inputs, B, C and step sizes; convolutions of inputs, B
    # and C, and their biases.
    "GroupsOfHeads": Pieces(ROWS, _mamba_groups, 1, mamba_channels, section=0),
    "ConvolvedGroups": Pieces(TAPS, _mamba_groups, 1, _convolved_of_mamba_group, section=0),
    "GroupsOfBiases": Pieces("(g n) -> g n", _mamba_groups, 1, _convolved_of_mamba_group, section=0),
    # Mamba-1: decays of several states for each channel. Ours is one dim.
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
"""All layouts that a family's file may name."""
