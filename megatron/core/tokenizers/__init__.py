"""Tokenizers, under Megatron-LM's names.

`build_tokenizer` builds the one of `--tokenizer-type`. A tokenizer's package is imported when it is built.
"""

from megatron.core.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, build_tokenizer

__all__ = ["ByteTokenizer", "NullTokenizer", "Tokenizer", "build_tokenizer"]
