"""Incremental decoding of tokens to text. Incomplete characters and text that may be the beginning of a stop string are
held back until later tokens can no longer change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Unicode replacement character. Tokenizers decode an incomplete character to a single replacement character, or to one
replacement character per byte."""

MOST_BYTES = 3
"""Maximum number of bytes of an incomplete UTF-8 character."""


class TextStream:
    """Stream that decodes the tokens after a prompt one by one.

    A token is decoded together with earlier tokens, because the space before a word may depend on the previous token,
    and a character may consist of several tokens. `finish` returns the text that was held back. Concatenating all
    returned pieces gives the complete text.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._tokens = list(prompt[-CONTEXT:])
        self._first, self._read = 0, len(self._tokens)
        self._decoded = detokenize(self._tokens)
        """Part of the text of `_tokens[_first:]` that belongs to the prompt or that `_taken` has already returned."""
        self._held = ""
        self.stopped = False
        """True if the text contains a stop string."""

    def add(self, token: int) -> str:
        """Add a token. Return the next part of the text, up to the first character that later tokens may still
        change."""
        self._tokens.append(token)
        return self._released(self._taken(final=False), final=False)

    def finish(self) -> str:
        """End the text. Return the rest of the text, which `add` has not returned yet."""
        if self.stopped:
            return ""
        return self._released(self._taken(final=True), final=True)

    def _taken(self, final: bool) -> str:
        """Return the characters that became complete with the latest tokens. If `final` is True, also return characters
        that are still incomplete."""
        text = self._detokenize(self._tokens[self._first :])
        stable = text if final else _whole(text)
        new = stable[len(self._decoded) :] if len(stable) > len(self._decoded) else ""
        if stable == text:
            self._first, self._read = self._read, len(self._tokens)
            self._decoded = self._detokenize(self._tokens[self._first :])
        elif new:
            self._decoded = stable
        return new

    def _released(self, new: str, final: bool) -> str:
        text = self._held + new
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


CONTEXT = 16
"""Number of prompt tokens that are decoded together with new tokens."""


def _whole(text: str) -> str:
    """Remove the last characters of a text that may form one character with the next tokens."""
    end = len(text)
    while end > max(0, len(text) - MOST_BYTES) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
