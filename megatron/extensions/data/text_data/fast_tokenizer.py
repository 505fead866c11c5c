"""Byte-pair encoding with the optional gigatoken package, which returns the same ids as `tokenizers` but is many times
faster.

The ids from gigatoken are compared with the ids of the replaced tokenizer. When the replacement is built, the ids of a
list of difficult strings are compared. Later, the ids of a fraction of all encoded documents are compared.
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers import Tokenizer
from megatron.extensions.data.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer

PROBES = (
    "a",
    " leading and trailing ",
    "two  spaces,   three\tand\t\ttabs\r\nlines\n\n\n",
    "I'll say it's they've WE'RE don't",
    "0123456789 3.14159 1,000,000 0x1F600",
    "naïve café Ångström ß ſ ﬁ Ⅻ ½",
    "汉字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b\u00a0\u2028\ufeff",
    "\x00\x01\x7f nulls",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # comment\n",
    "spelled <|endoftext|> and </s> within a text",
    "=" * 300 + " " * 300 + "ab" * 300,
)
BYTE_PAIR_TOKENIZERS = "HuggingFaceTokenizer and GPT2BPETokenizer"
ALWAYS_COMPARED, SHARE_COMPARED = 1 << 16, 200
"""Limits for comparing gigatoken's ids with the ids of the original tokenizer. All texts are compared until their total
length reaches `ALWAYS_COMPARED` characters. After that, about one in `SHARE_COMPARED` characters is compared."""


class DifferentIds(Exception):
    """Raised if gigatoken cannot replace a tokenizer, or returns different ids."""


class StandIn:
    """Tokenizer that uses the package gigatoken instead of `reference`, and compares some of its ids with the ids from
    `reference`. `stand_in_for` constructs instances."""

    def __init__(self, reference: HuggingFaceTokenizer | GPT2BPETokenizer) -> None:
        from gigatoken import Tokenizer as Gigatoken

        self.reference = reference
        self._fast = Gigatoken.from_json(reference.to_json())
        self.prefix, self.suffix = (np.array(ids, np.uint32) for ids in reference.added_around())
        self.seen = self.compared = 0
        """Number of characters encoded so far (`seen`), and number of characters whose ids were compared
        (`compared`)."""

        for text in (*PROBES, *(f"before{name}after {name}" for name in reference.special_names())):
            self._compare(text, self._encode(text))

    def tokenize(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text. Raises DifferentIds if the text is chosen for comparison and the reference
        tokenizer returns different ids."""
        ids = self._encode(text)
        self.seen += len(text)
        if self.compared < ALWAYS_COMPARED or self.compared * SHARE_COMPARED < self.seen:
            self.compared += len(text)
            self._compare(text, ids)
        return ids

    def _encode(self, text: str) -> NDArray[np.uint32]:
        ids = self._fast.encode(text)
        return np.concatenate([self.prefix, ids, self.suffix]) if self.prefix.size or self.suffix.size else ids

    def _compare(self, text: str, ids: NDArray[np.uint32]) -> None:
        expected = self.reference.tokenize(text)
        if not np.array_equal(ids, expected):
            raise DifferentIds(f"gigatoken and tokenizers encode {text[:60]!r} differently")


def stand_in_for(tokenizer: Tokenizer) -> StandIn:
    """Return a `StandIn` that replaces the given tokenizer. Raises DifferentIds with the reason if gigatoken cannot
    replace the tokenizer."""
    if not isinstance(tokenizer, HuggingFaceTokenizer | GPT2BPETokenizer):
        raise DifferentIds(f"gigatoken supports {BYTE_PAIR_TOKENIZERS}, not {type(tokenizer).__name__}")
    if importlib.util.find_spec("gigatoken") is None:
        raise DifferentIds("gigatoken is not installed: pip install gigatoken to tokenize many times faster")
    try:
        return StandIn(tokenizer)
    except DifferentIds:
        raise
    except Exception as error:
        # Any error means that gigatoken does not support this tokenizer. Only the first line of the message is shown,
        # because the other lines refer to gigatoken's source code.
        reason = str(error).split("\n", 1)[0]
        raise DifferentIds(f"gigatoken does not support this tokenizer: {reason}") from None
