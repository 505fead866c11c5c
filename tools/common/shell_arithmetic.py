"""Evaluate integer arithmetic as bash does, without running a shell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

TOKEN = re.compile(r"\s*(0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|[<>=!]=|&&|\|\||[-+*/%<>!~&|^?:()])\s*")
DEEPEST = 50
"""Maximum nesting depth of parentheses, and maximum length of a chain of variables that refer to each other."""


class UnknownNameError(ValueError):
    """Raised if a name in an expression has no known value."""


def evaluate(text: str, value_of: Callable[[str], str | None], depth: int = 0) -> int:
    """Return the value of an arithmetic expression. `value_of` maps the name of a variable to its text, which may be
    another expression, or to None if the variable is unknown. Raises UnknownNameError if a variable is unknown, and
    ValueError if the text is not a valid expression."""
    tokens, at = [], 0
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        if not found:
            raise ValueError(f"{text[at:]} is not an arithmetic expression")
        tokens.append(found[1])
        at = found.end()
    if not tokens:
        return 0
    return _Expression(tokens, value_of, depth).result()


def _divided(left: int, right: int) -> int:
    """Return the quotient truncated towards zero."""
    if not right:
        raise ValueError("division by 0")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ValueError("exponent less than 0")
    return pow(base, exponent, 1 << 64)


BINARY: list[dict[str, Callable[[int, int], int]]] = [
    {"||": lambda left, right: int(bool(left or right))},
    {"&&": lambda left, right: int(bool(left and right))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda left, right: left << (right & 63), ">>": lambda left, right: left >> (right & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divided, "%": lambda left, right: left - right * _divided(left, right)},
    {"**": _power},
]
"""Binary operators, from the lowest precedence to the highest."""

UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda value: int(not value),
}


class _Expression:
    """Recursive-descent parser of an expression's tokens."""

    def __init__(self, tokens: list[str], value_of: Callable[[str], str | None], depth: int) -> None:
        self.tokens = tokens[::-1]
        self.value_of = value_of
        self.depth = depth

    def result(self) -> int:
        value = self._choice()
        if self.tokens:
            raise ValueError(f"{self.tokens[-1]} is not expected")
        return value

    def _next(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def _take(self, expected: str) -> None:
        if self._next() != expected:
            raise ValueError(f"{expected} is expected")
        self.tokens.pop()

    def _choice(self) -> int:
        """Evaluate a conditional expression (`a ? b : c`), or an expression without a condition."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels")
        value = self._binary(0)
        if self._next() == "?":
            self.tokens.pop()
            first = self._choice()
            self._take(":")
            second = self._choice()
            value = first if value else second
        self.depth -= 1
        return value

    def _binary(self, level: int) -> int:
        if level == len(BINARY):
            return self._operand()
        value = self._binary(level + 1)
        if "**" in BINARY[level]:
            if self._next() != "**":
                return value
            self.tokens.pop()
            return _wrapped(_power(value, self._binary(level)))
        while (sign := self._next()) in BINARY[level]:
            self.tokens.pop()
            value = _wrapped(int(BINARY[level][sign](value, self._binary(level + 1))))
        return value

    def _operand(self) -> int:
        signs = []
        while self._next() in UNARY:
            signs.append(self.tokens.pop())
        token = self._next()
        if not token or not (token == "(" or token[0].isalnum() or token[0] == "_"):
            raise ValueError("a number is expected")
        self.tokens.pop()
        if token == "(":
            value = self._choice()
            self._take(")")
        elif token[0].isdigit():
            octal = token[0] == "0" and token.isdigit()
            value = int(token, 8 if octal else 0)
        else:
            text = self.value_of(token)
            if text is None:
                raise UnknownNameError(token)
            value = evaluate(text, self.value_of, self.depth + 1)
        for sign in reversed(signs):
            value = UNARY[sign](value)
        return _wrapped(value)


def _wrapped(value: int) -> int:
    """Wrap a number to a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
