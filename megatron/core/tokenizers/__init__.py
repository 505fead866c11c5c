"""Text to token ids and back, under Megatron's tokenizer names.

`build_tokenizer` makes the one that `--tokenizer-type` names. A tokenizer's package is imported when it is built.
"""

from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "NullTokenizer", "Tokenizer", "build_tokenizer"]
