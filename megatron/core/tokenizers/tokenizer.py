"""What every tokenizer offers, and the two that need no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. A special token that the tokenizer lacks is None."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included; not padded."""

    @property
    def eod(self) -> int | None:
        """Ends a document."""

    @property
    def bos(self) -> int | None:
        """Begins a sequence."""

    @property
    def eos(self) -> int | None:
        """Ends a sequence."""

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


class NullTokenizer:
    """Text that is token ids already, as decimal numbers between spaces.

    Ids 0 to vocab_size - 1 are the text's; EOD comes after them, so that there are vocab_size + 1 tokens.
    """

    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.eod = self.eos = vocab_size
        self.vocab_size = vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError for what is no number or no token."""
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} are not all in 0..{self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(id)) for id in ids)


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and EOD 256. Needs no file and loses no text."""

    vocab_size = 257
    eod = eos = 256
    bos = None

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Special tokens have no text; bytes that are no UTF-8 become replacement characters."""
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")
