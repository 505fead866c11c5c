"""Escape control characters in printed text. This module does not import torch.

Flag values, names that files contain, and exception messages may be untrusted. Escape sequences in untrusted text could
rename a terminal window, hide earlier lines, or type into the shell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from megatron.training.reliability.url_credentials import redacted

ORDINARY = "\t\n"
"""Control characters that are printed unchanged in text."""

DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode characters that change the display order of other characters."""

CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_TABLE = {code: f"\\x{code:02x}" for code in CONTROLS if chr(code) not in ORDINARY}
_TABLE |= {code: f"\\u{code:04x}" for code in (*DIRECTIONS, 0x2028, 0x2029)}
_LINE_TABLE = _TABLE | {ord("\n"): "\\n", ord("\t"): "\\t"}

LONGEST = 400
"""Maximum number of characters of a value in a message."""


def visible(text: str) -> str:
    r"""Escape control characters except line breaks and tabs as `\x1b`, and hide the credentials of URLs. Bytes of a
    path that are not valid UTF-8 are also escaped, because they cannot be printed."""
    return _printable(redacted(text).translate(_TABLE))


def visible_value(value: object) -> str:
    """Format a value as part of a line in a message. Control characters, line breaks and tabs are escaped, and
    credentials are hidden. The middle of a long text is omitted."""
    text = _printable(redacted(str(value)).translate(_LINE_TABLE))
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}...({len(text):,} characters)...{text[-half:]}"


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode() if not text.isascii() else text


PROGRESS = re.compile(r"(?P<start>\r?)(?P<text>.*?)(?P<end>(?:\x1b\[K)?)", re.DOTALL)
"""Regular expression for one update of a progress bar. The update returns to the start of the line, and may erase the
rest of the line."""

MOVES = re.compile(r"(?:\n|\x1b\[A)*")
"""Pattern of the line breaks and escape codes that move the cursor between the lines of several progress bars."""


class VisibleStream:
    """Text stream that applies `visible` to all text before writing it. The cursor movements of progress bars are
    written unchanged."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if MOVES.fullmatch(text) is None:
            found = PROGRESS.fullmatch(text)
            assert found is not None
            text = found["start"] + visible(found["text"]) + found["end"]
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


@contextmanager
def visible_output() -> Iterator[None]:
    """Context manager that applies `visible` to everything that is printed in its block. Use this context manager for
    programs that print no escape sequences of their own."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def exact(stream: TextIO) -> TextIO:
    """Return a stream for a program's results, such as generated text. Output is `visible` on a terminal, and unchanged
    in files and pipes."""
    return stream.stream if isinstance(stream, VisibleStream) and not stream.isatty() else stream
