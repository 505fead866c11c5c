"""Builds a tokenizer from flags."""

from __future__ import annotations

from pathlib import Path

from megatron.core.config.data import TokenizerConfig
from megatron.core.parts import TOKENIZERS
from megatron.core.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece import Llama2Tokenizer, SentencePieceTokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer


def sentencepiece(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return SentencePieceTokenizer(str(config.tokenizer_model))


def llama2(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return Llama2Tokenizer(str(config.tokenizer_model))


def huggingface(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return HuggingFaceTokenizer(str(config.tokenizer_model))


def gpt2_bpe(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return GPT2BPETokenizer(str(config.vocab_file), str(config.merge_file))


def null(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None or vocab_size < 2:
        raise ValueError(
            "--tokenizer-type NullTokenizer: needs --vocab-size N, at least 2: the number of token ids, of which the "
            "last one ends a document"
        )
    return NullTokenizer(vocab_size)


def byte(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return ByteTokenizer()


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """Builds the tokenizer of `--tokenizer-type`. Only NullTokenizer uses `vocab_size` (--vocab-size).

    Raises ValueError naming every flag or file that is missing.
    """
    kind, problems = str(config.tokenizer_type), []
    facts = TOKENIZERS.facts(kind)
    for field in facts.needs:
        flag, value = "--" + field.replace("_", "-"), getattr(config, field)
        if value is None:
            problems.append(f"--tokenizer-type {kind}: needs {flag} FILE")
        elif not facts.finds_files and not Path(value).exists():
            remedy = "correct the path" if Path(value).is_absolute() else f"the path is relative to {Path.cwd()}"
            problems.append(f"{flag} {value}: there is no such file; {remedy}")
    if problems:
        raise ValueError("\n".join(problems))
    return TOKENIZERS[kind](config, vocab_size)
