"""Interface of a tokenizer, and two tokenizers without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Converts text to token ids and back. A missing special token is None."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, including special tokens, without padding."""

    @property
    def eod(self) -> int | None:
        """End-of-document token."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence token."""

    @property
    def eos(self) -> int | None:
        """End-of-sequence token."""

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def find(self, token: str) -> int | None:
        """The id of one token by its name, such as "<fim_prefix>"; None if there is none."""


class NullTokenizer:
    """For text that consists of token ids: decimal numbers separated by spaces.

    EOD is the last of the vocab_size ids; the text uses the others.
    """

    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.eod = self.eos = vocab_size - 1
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError for a word that is not a number or not a token id."""
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} must be in 0..{self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(id)) for id in ids)

    def find(self, token: str) -> int | None:
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and EOD 256. Lossless, without a file."""

    vocab_size = 257
    eod = eos = 256
    bos = None

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens have no text; invalid UTF-8 becomes replacement characters."""
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    def find(self, token: str) -> int | None:
        return token.encode()[0] if len(token.encode()) == 1 else None
