"""What is wrong with a configuration, one item at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.reliability.launch import tell_last


@dataclass(frozen=True)
class Problem:
    """A flag, its value (None: not given), the rule that it breaks and what to do about it."""

    flag: str
    value: Any
    rule: str
    remedy: str

    @classmethod
    def of_errors(cls, flag: str, value: Any, error: Exception) -> list[Problem]:
        """The problems that reading a file brought up, one for each line of the error's message.

        A line of the form `--flag value: rule; remedy` speaks for itself, any other of `flag`.
        """
        found = []
        for line in str(error).splitlines() or [type(error).__name__]:
            named, colon, rest = line.partition(": ")
            if colon and named.startswith("--"):
                rule, _, remedy = rest.partition("; ")
                found.append(cls(named, None, rule, remedy or "correct it"))
            else:
                found.append(cls(flag, value, line, "correct the flag or the file it names"))
        return found

    @classmethod
    def of_message(cls, flag: str, value: Any, message: str) -> Problem:
        """A problem from the message of a ValueError of the form `flag value: rule; remedy`."""
        rule, _, remedy = message.partition(": ")[2].partition("; ")
        return cls(flag, value, rule or message, remedy or "correct it")

    def __str__(self) -> str:
        if self.value is None:
            value = ""
        elif isinstance(self.value, tuple | list):
            value = " " + " ".join(str(v) for v in self.value)
        else:
            value = f" {self.value}"
        return f"{self.flag}{value}: {self.rule}; {self.remedy}"


def print_problems(problems: Sequence[Problem]) -> None:
    """One line each, under a line that counts them; under torchrun that is the last thing on the screen."""
    head = f"This configuration cannot run: {len(problems)} problem{'s' if len(problems) != 1 else ''}."
    tell_last("\n".join([head, *(f"  {problem}" for problem in problems)]))


def multiples(value: int, divisor: int) -> str:
    """The nearest legal values: `nearest: 996 or 1008`."""
    below = value // divisor * divisor
    return f"nearest: {below} or {below + divisor}" if below > 0 else f"nearest: {divisor}"


def divides(divisor: int | None, value: int | None) -> bool:
    """Whether `divisor` divides `value`; True where either is missing or not positive, which another rule reports."""
    return not divisor or not value or divisor < 0 or value < 0 or value % divisor == 0
