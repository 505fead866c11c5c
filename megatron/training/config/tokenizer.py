"""The tokenizer of a run. No torch.

--vocab-size does not include the end-of-document token that a NullTokenizer adds. The vocabulary of a resolved
configuration includes it.
"""

from __future__ import annotations

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.tokenizers import Tokenizer, build_tokenizer


def vocab_size_flag(tokenizer: TokenizerConfig, model: TransformerConfig) -> int | None:
    """The value of --vocab-size in a resolved configuration."""
    if model.vocab_size is None:
        return None
    return model.vocab_size - (tokenizer.tokenizer_type == "NullTokenizer")


def resolved_tokenizer(tokenizer: TokenizerConfig, model: TransformerConfig) -> Tokenizer:
    """Builds the tokenizer of a resolved configuration. Raises ValueError if its files are missing."""
    return build_tokenizer(tokenizer, vocab_size_flag(tokenizer, model))
