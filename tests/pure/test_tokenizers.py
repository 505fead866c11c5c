"""Tests of tokenizers that need no files. Decoding restores the text, and special tokens have the same ids as in
Megatron-LM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def build(kind, vocab_size=None, **kwargs):
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **kwargs), vocab_size)


@given(UNICODE)
def test_byte_tokens_are_lossless(text):
    tokenizer = build("ByteTokenizer")
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_the_last_id_of_a_null_tokenizer_is_eod():
    tokenizer = build("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("1 2  99\n") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2, 99]) == "1 2 99"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.eos, tokenizer.bos) == (100, 99, 99, None)
    with pytest.raises(ValueError, match=r"must be in 0\.\.99"):
        tokenizer.tokenize("1 100")


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"^--tokenizer-type must be given, .*: choose one of Null"):
        build_tokenizer(TokenizerConfig())
    with pytest.raises(ValueError, match="--tokenizer-type NoSuch: must be one of NullTokenizer, ByteTokenizer"):
        build("NoSuch")
    with pytest.raises(ValueError, match="--tokenizer-type NullTokenizer: needs --vocab-size N"):
        build("NullTokenizer")
