"""Builds a tokenizer from flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece import Llama2Tokenizer, SentencePieceTokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer

NEEDED_FILES = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": (),
    "ByteTokenizer": (),
}


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """Builds the tokenizer of `--tokenizer-type`. Only NullTokenizer uses `vocab_size` (--vocab-size).

    Raises ValueError naming every flag or file that is missing.
    """
    kind = config.tokenizer_type
    if kind not in NEEDED_FILES:
        raise ValueError(f"--tokenizer-type {kind}: must be one of {', '.join(NEEDED_FILES)}")
    problems = []
    for field in NEEDED_FILES[kind]:
        flag, value = "--" + field.replace("_", "-"), getattr(config, field)
        if value is None:
            problems.append(f"--tokenizer-type {kind}: needs {flag} FILE")
        elif not Path(value).exists():
            problems.append(f"{flag} {value}: there is no such file; the path is relative to {Path.cwd()}")
    if kind == "NullTokenizer" and (vocab_size is None or vocab_size < 1):
        problems.append("--tokenizer-type NullTokenizer: needs --vocab-size N, the number of token ids in the text")
    if problems:
        raise ValueError("\n".join(problems))
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(str(config.vocab_file), str(config.merge_file))
    if kind == "NullTokenizer":
        assert vocab_size is not None
        return NullTokenizer(vocab_size)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    by_model: dict[str, Callable[[str], Tokenizer]] = {
        "SentencePieceTokenizer": SentencePieceTokenizer,
        "Llama2Tokenizer": Llama2Tokenizer,
        "HuggingFaceTokenizer": HuggingFaceTokenizer,
    }
    return by_model[kind](str(config.tokenizer_model))
