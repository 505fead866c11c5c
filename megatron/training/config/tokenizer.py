"""The tokenizer of a run. No torch.

--vocab-size leaves out the end-of-document token that a NullTokenizer adds; a resolved configuration's vocabulary
counts it.
"""

from __future__ import annotations

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.tokenizers import Tokenizer, build_tokenizer


def vocab_size_flag(tokenizer: TokenizerConfig, model: TransformerConfig) -> int | None:
    """What --vocab-size says, of a resolved configuration."""
    if model.vocab_size is None:
        return None
    return model.vocab_size - (tokenizer.tokenizer_type == "NullTokenizer")


def resolved_tokenizer(tokenizer: TokenizerConfig, model: TransformerConfig) -> Tokenizer:
    """The tokenizer that a resolved configuration was resolved with. Raises ValueError if its files are not there."""
    return build_tokenizer(tokenizer, vocab_size_flag(tokenizer, model))
