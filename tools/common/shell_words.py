"""Split the text of a shell script into commands, words and parts of words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

CLOSERS = {"'": "'", '"': '"', "`": "`", "${": "}", "$(": ")", "(": ")"}
BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
OPERATOR = re.compile(r"\n|;;&?|;&|;|&&|&|\|\|?&?|\(\s*\)|[()]")
REDIRECTION = re.compile(r"(?:\d*(?:<<<|<<-?|>>|>&|<&|>\||<>|>|<)|&>>?)(?!\()(?:[ \t]|\\\n)*")
PLAIN_VARIABLE = re.compile(r"\$(?:\d|\w+|[@*#?])")

UNKNOWN = re.compile(r"\$[\w{(@*#?!]|`")
"""Placeholder for an unknown variable, or for a value that only a shell can compute."""


def span_end(text: str, start: int, quoted: bool = False) -> int:
    """Return the end of the piece that begins at `start`: a quotation, a substitution, parentheses, or one character.
    If `quoted` is true, the text is inside double quotes, where quotation marks and parentheses are ordinary
    characters. Raises ValueError if a quotation mark or bracket is not closed."""
    if text[start] == "\\":
        return min(start + 2, len(text))
    if name := PLAIN_VARIABLE.match(text, start):
        return name.end()
    opener = next((opener for opener in CLOSERS if text.startswith(opener, start)), "")
    if not opener or (quoted and opener in "'\"("):
        return start + 1
    at = start + len(opener)
    while at < len(text) and text[at] != CLOSERS[opener]:
        if opener == "'" or (opener == "${" and text[at] == "("):
            at += 1
        elif text[at] == "#" and opener.endswith("(") and text[at - 1].isspace():
            at = BLANK.match(text, at).end()  # type: ignore[union-attr]
        else:
            at = span_end(text, at, opener == '"')
    if at >= len(text):
        raise ValueError(f"{opener} is not closed")
    return at + 1


def pieces(text: str, quoted: bool = False) -> Iterator[str]:
    """Yield the quotations, substitutions and single characters of a text."""
    at = 0
    while at < len(text):
        try:
            end = span_end(text, at, quoted)
        except ValueError:
            end = at + 1
        yield text[at:end]
        at = end


def split(value: str) -> list[str]:
    """Split a variable's value into fields, without the quotes meant for `eval`."""
    fields, inside = [""], False
    for piece in pieces(value):
        if piece.isspace():
            fields += [""] if inside else []
        else:
            fields[-1] += piece[1:-1] if piece[0] in "'\"" and len(piece) > 1 else piece
        inside = not piece.isspace()
    return fields if fields[-1] or inside else fields[:-1]


def commands(text: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """Yield the commands in all branches of a script. Each command is a tuple of three values: its words as written,
    including reserved words; the operator that follows the command; and its here-documents. Raises ValueError if the
    text is not a script."""
    words: list[str] = []
    marks: list[str] = []  # of here-documents
    at = 0
    while at < len(text):
        testing = "[[" in words and "]]" not in words
        if blank := BLANK.match(text, at):
            at = blank.end()
        elif not testing and (found := REDIRECTION.match(text, at)):
            at, end = found.end(), word_end(text, found.end())
            marks += [text[at:end].strip("'\"\\")] if found[0].strip() in ("<<", "<<-") else []
            at = end
        elif not text.startswith("((", at) and (found := OPERATOR.match(text, at)):
            at = found.end()
            if testing:
                words += found[0].split()
                continue
            if found[0] == "(" and words and words[-1] != "in":
                raise ValueError("( is not expected")
            documents = []
            while found[0] == "\n" and marks:
                close = re.compile(rf"^\t*{re.escape(marks.pop(0))}$", re.M).search(text, at)
                documents.append(text[at : close.start() if close else len(text)])
                at = close.end() if close else len(text)
            yield words, found[0].strip() or "\n", documents
            words = []
        else:
            end = span_end(text, at) if text.startswith("((", at) else max(word_end(text, at), at + 1)
            words.append(text[at:end])
            at = end
    yield words, "\n", []


def word_end(text: str, at: int) -> int:
    """Return the position of the end of the word that begins at position `at`. Parentheses that follow =, < or > belong
    to the word, as in `A=(1 2)`."""
    while at < len(text):
        nested = text[at] == "(" and text[at - 1] in "=<>"
        if text[at] in " \t\n;&|()<>" and not nested and text[at : at + 2] not in ("<(", ">("):
            break
        at = span_end(text, at)
    return at


def quoted(word: str) -> str:
    """Quote a word so that it can be pasted into a shell. The shell still expands the variables in the word."""
    if not UNKNOWN.search(word):
        return shlex.quote(word)
    escaped = (
        piece if UNKNOWN.match(piece) else re.sub(r'(["\\])', r"\\\1", piece) for piece in pieces(word, quoted=True)
    )
    return f'"{"".join(escaped)}"'
