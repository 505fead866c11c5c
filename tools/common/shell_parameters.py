"""Evaluate shell parameter expansions in braces: substrings and array slices such as `${A[@]:1}`, removed suffixes such
as `${NAME%.json}`, lengths, and replacements."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import translate

from .shell_words import UNKNOWN

PARAMETER = re.compile(
    r"\$(?:\{(?P<length>#?)(?P<name>\w+)(?:\[(?P<index>[^]]*)\])?"
    r"(?:(?P<sign>:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?)(?P<word>.*))?\}|(?P<bare>\w+))",
    re.S,
)
DEFAULTS = ("-", "=", "+", "?")
"""Last characters of the operators that handle unset variables, such as `-` in `${NAME:-word}`."""

Value = str | list[str]
Number = Callable[[str], int]
"""Function that evaluates text as arithmetic. Raises ValueError if the value is unknown."""


@dataclass(frozen=True)
class Parameter:
    """Parsed parameter expansion of a shell script, such as `${NAME:-word}`."""

    name: str
    sign: str = ""
    word: str = ""
    index: str | None = None
    length: bool = False

    @classmethod
    def read(cls, piece: str) -> Parameter | None:
        """Parse a parameter expansion such as `${NAME}`. Return None if the text is not a parameter expansion."""
        found = PARAMETER.fullmatch(piece)
        if found is None:
            return None
        name = found["name"] or found["bare"]
        return cls(name, found["sign"] or "", found["word"] or "", found["index"], bool(found["length"]))

    @property
    def has_default(self) -> bool:
        return self.sign.endswith(DEFAULTS)

    @property
    def plain(self) -> bool:
        """True if the parameter is a variable, or a whole array, without an operator."""
        return not self.sign and not self.length and self.index in (None, "@", "*")

    def part(self, value: Value, number: Number) -> Value:
        """Return the element of an array variable that the index selects, or the whole value if there is no index.
        Raises ValueError if the value of the index is unknown."""
        if self.index in (None, "@", "*"):
            return value
        values = [value] if isinstance(value, str) else value
        at = number(str(self.index))
        return values[at] if -len(values) <= at < len(values) else ""

    def changed(self, value: Value, word: str, number: Number) -> Value | None:
        """Apply the operator of this parameter expansion to `value`. `word` is the operand of the operator, such as a
        pattern. Return None or raise ValueError if the result cannot be determined."""
        texts = [value] if isinstance(value, str) else value
        if any(UNKNOWN.search(text) for text in [word, *([] if self.length and self.index else texts)]):
            return None
        if self.length:
            whole = self.index in ("@", "*")
            return str(len(texts) if whole else len(texts[0]) if texts else 0)
        if self.sign == ":":
            return _cut(value, *(number(part) for part in word.split(":")))
        found = [_replaced(text, self.sign, word) for text in texts]
        return found[0] if isinstance(value, str) else found


def _cut(value: Value, start: int, count: int | None = None) -> Value | None:
    """Return the part of a string or array that `${NAME:start:count}` selects. A negative `start` counts from the end.
    For strings, a negative `count` is the position of the end, also counted from the end."""
    if start < -len(value):
        return value[:0]
    start += len(value) if start < 0 else 0
    if count is not None and count < 0 and not isinstance(value, str):
        return None
    end = None if count is None else count + len(value) if count < 0 else start + count
    return value[start:end]


def _replaced(text: str, sign: str, word: str) -> str:
    """Apply an operator of a parameter expansion to a string. `#` and `%` remove a matching beginning or end, `/`
    replaces text, and `^` and `,` change the case."""
    if sign in ("^^", ",,", "^", ","):
        change = str.upper if sign[0] == "^" else str.lower
        return change(text) if len(sign) == 2 else change(text[:1]) + text[1:]
    if sign[0] == "/":
        pattern, _, other = word.partition("/")
        expression = re.compile(translate(pattern).removesuffix(r"\Z"))
        return expression.sub(lambda found: other, text, count=0 if sign == "//" else 1) if pattern else text
    matches = re.compile(translate(word)).fullmatch
    cuts = range(len(text) + 1) if sign in ("#", "%%") else range(len(text), -1, -1)
    for cut in cuts:
        removed, left = (text[:cut], text[cut:]) if sign[0] == "#" else (text[cut:], text[:cut])
        if matches(removed):
            return left
    return text
