"""The heads of self-attention, as the rows of linear_qkv hold them. No torch."""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig


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
    """Returns whether queries, gates, keys and values have heads of one width."""
    return all(
        rows == count * config.head_dim for rows, count in zip(group_rows(config), head_counts(config), strict=True)
    )
