"""New text as its tokens come: characters are held back until they are whole, and texts that may become a stop string
until it is known. No model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""Character to which tokenizers decode an incomplete one, once or for each of its bytes."""

MOST_BYTES = 3
"""Bytes of an incomplete character of UTF-8."""


class TextStream:
    """Decodes the tokens behind a prompt one by one.

    A token is decoded with those before it, as some tokenizers write a word with or without a space, and some
    characters in several tokens. `finish` returns what is held back; all that was returned, in a row, is the text.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._tokens = list(prompt[-CONTEXT:])
        self._first, self._read = 0, len(self._tokens)
        self._decoded = detokenize(self._tokens)
        """The text of the tokens from `_first` on that has been taken."""
        self._held = ""
        self.stopped = False
        """True if a stop string has come."""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        return self._released(self._taken(final=False), final=False)

    def finish(self) -> str:
        """All that was held back."""
        if self.stopped:
            return ""
        return self._released(self._taken(final=True), final=True)

    def _taken(self, final: bool) -> str:
        """New whole characters."""
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
"""Tokens of the prompt that new ones are decoded with."""


def _whole(text: str) -> str:
    """Without what may become one character with the next tokens."""
    end = len(text)
    while end > max(0, len(text) - MOST_BYTES) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
