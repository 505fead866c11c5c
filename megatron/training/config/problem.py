"""Problems of a configuration: flag, value, rule and remedy."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.file_storage import UrlPath, located
from megatron.training.reliability.launch import tell_last
from megatron.training.reliability.url_credentials import redacted, take_credentials
from megatron.training.reliability.visible_text import CONTROLS, visible, visible_value

if TYPE_CHECKING:
    from argparse import ArgumentParser

NO_URL = (
    "is a URL, but only paths of mounted file systems are accepted here",
    "use such a path, and copy from or to the other storage yourself",
)
"""Rule and remedy for a flag whose value must be a local path, but is a URL."""

NO_STORAGE = "use a path of a mounted file system, or the --extension that registers the storage (docs/extending.md)"
"""Remedy for a URL with a scheme for which no storage is registered."""


SECRET = (
    "contains credentials, which would be saved with the run",
    "pass them to the storage in the environment (docs/extending.md)",
)
"""Rule and remedy for a storage URL that contains a password, a token or a signature."""

LONGEST_NAME = 255
"""Maximum length in bytes of a file name on Linux file systems."""

LONGEST_PATH = 4095

MEMORY, NULL = 1, 3
"""Device numbers on Linux: the major number of all memory devices, such as /dev/zero and /dev/full, and the minor
number of /dev/null."""


@dataclass(frozen=True)
class Problem:
    """Problem of a configuration: a flag, its value or None, the rule that the value violates, and a remedy."""

    flag: str
    value: object
    rule: str
    remedy: str
    harmless: bool = False
    """True if the problem is only that the flag has no effect, so that the run can start."""

    @classmethod
    def of_errors(cls, flag: str, value: object, error: Exception) -> list[Problem]:
        """Return a problem for each line of the message of `error`, such as an error raised while reading a file.

        If a line of the message has the form `--flag value: rule; remedy`, the problem belongs to the flag in this
        line. Otherwise, it belongs to `flag`.
        """
        found = []
        for line in str(error).splitlines() or [type(error).__name__]:
            named, colon, _ = line.partition(": ")
            if colon and named.startswith("--"):
                name, _, given = named.partition(" ")
                found.append(cls.of_message(name, given or None, line))
            else:
                found.append(cls(flag, value, line, "correct the flag or the file it names"))
        return found

    @classmethod
    def no_effect(cls, flag: str, value: object, needed: str) -> Problem:
        """Return a notice about a flag that has no effect without another flag."""
        return cls(flag, value, f"has no effect without {needed}", f"add {needed}, or remove {flag}", harmless=True)

    @classmethod
    def exclusive(cls, flag: str, value: object, other: str, why: str = "") -> Problem:
        """Return the problem that two flags cannot be combined."""
        return cls(flag, value, f"cannot be combined with {other}{why and f': {why}'}", "keep one of them")

    @classmethod
    def of_message(cls, flag: str, value: object, message: str) -> Problem:
        """Convert an error message of the form `flag value: rule; remedy` to a problem."""
        rule, _, remedy = message.partition(": ")[2].partition("; ")
        return cls(flag, value, rule or message, remedy or "correct it")

    @property
    def record(self) -> dict[str, str]:
        """Description of the problem as a mapping, for the JSON output of a command."""
        about = {"flag": self.flag, "rule": self.rule, "remedy": self.remedy, "text": str(self)}
        return {key: redacted(text) for key, text in about.items()}

    def __str__(self) -> str:
        values = self.value if isinstance(self.value, tuple | list) else [] if self.value is None else [self.value]
        given = " ".join([visible_value(self.flag), *map(_shown, values)])
        return redacted(f"{given}: {visible(self.rule)}; {visible(self.remedy)}")


def problems_of(found: Iterable[object]) -> Iterator[Problem]:
    """Yield the problems that a registered validation rule has found. Raises TypeError if a rule yields any other
    object."""
    for problem in found:
        if not isinstance(problem, Problem):
            raise TypeError(f"rules must yield Problem, but yield {problem!r}")
        yield problem


def _shown(value: object) -> str:
    """Format a value for a message, in quotes if it would otherwise be invisible."""
    text = visible_value(value)
    return text if str(value).strip() else f"'{text}'"


def text_rule(text: str) -> tuple[str, str] | None:
    """Return (rule, remedy) for a text that no flag accepts as its value, or None for any other text.

    Flags refuse texts that are empty or consist of white space, for example because a shell variable was not set, and
    texts with control characters.
    """
    if not text.strip():
        rule = "is only white space" if text else "is empty"
        return rule, "give a value, or remove the flag"
    found = next((character for character in text if ord(character) in CONTROLS), None)
    if found is None:
        return None
    return f"has the control character U+{ord(found):04X}", "remove it from the value"


def checked_texts(parser: ArgumentParser) -> ArgumentParser:
    """Make a tool's parser refuse texts and paths that violate `text_rule`, and return the parser.

    For an argument that accepts any text, pass `type=any_text` to `add_argument`. For a path that may be in any
    storage, pass `type=located`.
    """
    from argparse import ArgumentTypeError  # imported here, because runs do not need argparse

    def text(given: str) -> str:
        if (broken := text_rule(given)) is not None:
            raise ArgumentTypeError(f"{_shown(given)} {'; '.join(broken)}")
        return given

    for kind in (None, str):
        parser.register("type", kind, text)

    def stored(given: str) -> PurePath:
        if "://" in text(given) and (broken := path_rule("stored", given)) is not None:
            raise ArgumentTypeError(f"{_shown(redacted(given))} {'; '.join(broken)}")
        return located(given)

    parser.register("type", Path, lambda given: Path(text(given)))
    parser.register("type", located, stored)
    return parser


def any_text(text: str) -> str:
    """Return the text unchanged. Use this function as the argparse type of a flag that accepts empty values and control
    characters."""
    return text


def print_problems(problems: Sequence[Problem], json_file: str | None = None) -> None:
    """Print the number of problems, and one line for each problem, as the last lines on the screen.

    If `json_file` is not None, the problems are also written to that file as JSON. If `json_file` is empty, the JSON is
    written to standard output."""
    if json_file is not None:
        text = json.dumps({"problems": [each.record for each in problems]}, indent=1) + "\n"
        if not json_file:
            print(text, end="", flush=True)
        else:
            with suppress(OSError):  # if the JSON file cannot be written, one of the printed problems reports this
                Path(json_file).write_text(text, encoding="utf-8")
    head = f"This configuration cannot run: {len(problems)} problem{'s' if len(problems) != 1 else ''}."
    tell_last("\n".join([head, *(f"  {problem}" for problem in problems)]))


def multiples(value: int, divisor: int) -> str:
    """Return the nearest multiples of `divisor` as a remedy: `nearest: 996 or 1008`."""
    below = value // divisor * divisor
    return f"nearest: {below} or {below + divisor}" if below > 0 else f"nearest: {divisor}"


def unless_multiple(
    flag: str, value: int | None, name: str, divisor: int, step: int | None = None
) -> Iterator[Problem]:
    """Yield a problem if a value is not a multiple of `divisor`. The message is "must be a multiple of `name`
    `divisor`", where `name` is usually the flag that sets the divisor.

    The remedy names the nearest multiples of `step`, which defaults to the divisor.
    """
    if not divides(divisor, value):
        yield Problem(flag, value, f"must be a multiple of {name} {divisor}", multiples(value or 0, step or divisor))


def unless_at_most(flag: str, value: float, name: str, limit: float) -> Iterator[Problem]:
    """Yield a problem with `flag` if its value is above `limit`, which is the value of another flag, `name`."""
    if value > limit:
        shown = f"{limit:g}" if isinstance(limit, float) else str(limit)
        yield Problem(flag, value, f"must be at most {name} {shown}", f"nearest: {shown}")


def nearest_divisor(size: int, value: int) -> int:
    return min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - value))


def divides(divisor: int | None, value: int | None) -> bool:
    """Return True if `divisor` divides `value`. If one of the numbers is missing or not positive, return True, because
    another rule reports such a number."""
    return not divisor or not value or divisor < 0 or value < 0 or value % divisor == 0


def path_rule(kind: str, path: str) -> tuple[str, str] | None:
    """Return (rule, remedy) if no file can have the path `path`, or if `path` is a device with endless content.
    Otherwise, return None.

    `kind` is a value of `FlagSpec.path`, such as "local".
    """
    if "://" in path:
        if kind == "stored" and take_credentials(path) != path:
            return SECRET
        if kind == "stored" and not isinstance(located(path), UrlPath):
            return f"is a URL, but no storage is registered for {path.partition('://')[0]}://", NO_STORAGE
        if kind == "stored" and path.partition("://")[2].startswith("/"):
            return "is a URL with no name after ://", "write SCHEME://NAME/FOLDER"
        return NO_URL if kind == "local" else None
    if "\0" in path:
        return "contains a null byte, which paths cannot contain", "correct the path"
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    if longest > LONGEST_NAME:
        return f"has a name of {longest:,} bytes, but file systems allow only {LONGEST_NAME}", "use shorter names"
    if len(os.fsencode(path)) > LONGEST_PATH:
        return f"is longer than {LONGEST_PATH:,} bytes, the longest path", "use shorter names"
    if _is_endless(path):
        return "is a device with endless content", "name a file"
    return None


def _is_endless(path: str) -> bool:
    """Return True if a path is a disk, or a memory device other than /dev/null, such as /dev/zero."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    memory = stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == MEMORY and os.minor(found.st_rdev) != NULL
    return memory or stat.S_ISBLK(found.st_mode)
