"""Replace shell variables whose values are known, and evaluate tests that depend only on known values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .shell_arithmetic import evaluate
from .shell_parameters import Parameter
from .shell_words import UNKNOWN, pieces, span_end, split

NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
BARE_NAME = re.compile(r"(?<![\w${])[A-Za-z_]\w*(?!\w)")
FROM_ENVIRONMENT = re.compile(
    r"(?:SLURM|OMPI|PMIX?|PBS|LSB|CUDA|NCCL|NVIDIA|ROCR|HIP|TORCHELASTIC|KUBERNETES|AWS|AZ|CONDA|SSH|XDG)_\w*"
    r"|(?:(?:LOCAL|NODE|GROUP)_?)?RANK|(?:LOCAL_)?WORLD_SIZE|NNODES|MASTER_(?:ADDR|PORT)|\w*(?:KEY|TOKEN)"
    r"|HOME|USER|LOGNAME|PWD|OLDPWD|PATH|PYTHONPATH|LD_LIBRARY_PATH|HOST|HOSTNAME|SHELL|TMPDIR|RANDOM|SECONDS|E?UID"
)
"""Pattern of variable names that the login shell, a launcher or a job scheduler may set before the script runs."""

MOST = 500_000
"""Maximum total number of characters to which a script's variables may expand. The limit is needed because each line
can double a variable."""

NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
"""Arithmetic operator for each numeric comparison operator of a shell test."""

NO = 0.0
UNSURE = 0.5
YES = 1.0
"""Truth value of a test that succeeds; `NO` is the value of a test that fails. The operators of tests are computed on
these values: `!` is 1 - x, `&&` is the minimum, and `||` is the maximum."""


class ExpansionError(Exception):
    """Raised if the variables of a script expand to too much text."""


@dataclass
class ShellVariables:
    """Values of the variables of a shell script. Methods raise ExpansionError if variables expand to more than `MOST`
    characters in total."""

    values: dict[str, str | list[str]] = field(default_factory=dict)
    read_as_unset: list[str] = field(default_factory=list)
    """Variables that tests read but that the script does not set."""

    _given: set[str] = field(default_factory=set)
    """Variables set by loops and by `read`."""

    sources: bool = False
    """True if this script sources another script, which may have set variables."""

    _expanded: int = 0
    """Number of characters to which variables have expanded so far."""

    def test(self, words: list[str]) -> float:
        """Evaluate a test. Return `YES`, `NO`, or `UNSURE` if the result depends on unknown values."""
        if words[0] == "!":
            return YES - self.test(words[1:]) if words[1:] and words[1][0] in "[(" else UNSURE
        if words[0].startswith("(("):
            return self._nonzero(words[0][2:-2])
        if words[0] == "[[":
            given = [self.tested_text(word) for word in words[1:] if word != "]]"]
        else:
            given = [text for word in words[1:] if word != "]" for text in self._tested_fields(word)]
        parts = (_parted(each, "&&", "-a") for each in _parted(given, "||", "-o"))
        return max(min(self._clause(clause, words[0] == "[[") for clause in part) for part in parts)

    def _clause(self, words: list[str], doubled: bool) -> float:
        """Evaluate a single comparison of a test. `doubled` is true if the test uses double brackets."""
        match words:
            case ["!", *rest]:
                return YES - self._clause(rest, doubled)
            case ["-z", text]:
                return YES - self._clause([text], doubled)
            case ["-v", name] if name.isidentifier():
                return YES if name in self.values else UNSURE if self._may_be_set(name) else NO
            case ["-n", text] | [text]:
                return UNSURE if UNKNOWN.search(text) else float(bool(text))
            case [text, sign, other] if sign in NUMBERS and doubled:
                if UNKNOWN.search(text + other):
                    return UNSURE
                return self._nonzero(f"({text or 0}) {NUMBERS[sign]} ({other or 0})")
            case [text, sign, other]:
                return compared(text, sign, other)
            case [sign, text] if sign in ("=", "==", "!=") or sign in NUMBERS:
                return UNSURE if UNKNOWN.search(text) else NO  # an operand is missing, which is an error in bash
        return UNSURE

    def _nonzero(self, expression: str) -> float:
        """Return `YES` if the expression evaluates to a nonzero number, `NO` for zero, and `UNSURE` if the value is
        unknown."""
        try:
            return float(bool(evaluate(self.tested_text(expression, quoted=True), self._tested_number)))
        except ValueError:
            return UNSURE

    def _tested_fields(self, word: str) -> list[str]:
        """Return the fields to which a word expands in a test with single brackets. As in bash, a variable that is
        unquoted and empty expands to no field."""
        found = NAME.fullmatch(word)
        absent = found and not self.values.get(name := found[1] or found[2]) and self._unset(name)
        return [] if absent else [self.tested_text(word)]

    def tested_text(self, word: str, quoted: bool = False) -> str:
        """Expand a word in the condition of a shell test. Variables that count as unset are removed from the word."""
        return NAME.sub(lambda found: "" if self._unset(found[1] or found[2]) else found[0], self.word(word, quoted))

    def _tested_number(self, name: str) -> str | None:
        return "0" if self._unset(name) else self._number(name)

    def _unset(self, name: str) -> bool:
        """Return True if the variable `name` counts as unset or empty in a test. Return False if the variable may be
        set outside the script."""
        if name in self.values:
            return not self.values[name]
        if self._may_be_set(name):
            return False
        if name not in self.read_as_unset:
            self.read_as_unset.append(name)
        return True

    def _may_be_set(self, name: str) -> bool:
        """Return True if a variable may get its value from something other than an assignment in the script, such as
        the environment."""
        outside = name.isdigit() or FROM_ENVIRONMENT.fullmatch(name) is not None
        return outside or name in self._given or self.sources

    def forget(self, names: list[str]) -> None:
        """Mark the values of variables as unknown."""
        self._given.update(names)
        for name in names:
            self.values.pop(name, None)

    def fields(self, word: str) -> list[str]:
        """Return the fields to which a word expands. An unquoted variable or an array expansion such as `"${A[@]}"` may
        expand to several fields."""
        fields = [""]
        quotes = False
        for piece in pieces(word):
            if piece.startswith('"$') and "[@]" in piece and piece.endswith('}"'):
                value = self.value(piece[1:-1])
                parts = [piece[1:-1]] if value is None else listed(value)
            elif piece[0] in "$`":
                value = self.value(piece)
                parts = [piece] if value is None else split(value) if isinstance(value, str) else value
            else:
                parts, quotes = [self.word(piece)], True
            fields[-1] += parts[0] if parts else ""
            fields += parts[1:]
        return fields if quotes or fields != [""] else []

    def word(self, word: str, quoted: bool = False) -> str:
        """Return a word without quotes, in which known variables are replaced with their values."""
        found = []
        for piece in pieces(word, quoted):
            if piece[0] in "$`" and (value := self.value(piece)) is not None:
                found.append(" ".join(listed(value)))
            elif len(piece) > 1 and piece[0] in "'\"":
                found.append(self.word(piece[1:-1], quoted=True) if piece[0] == '"' else piece[1:-1])
            elif piece[0] == "\\" and (not quoted or piece[1:] in ("\n", '"', "\\", "$", "`")):
                found.append(piece[1:].strip("\n"))
            else:
                found.append(piece)
        return "".join(found)

    def value(self, piece: str) -> str | list[str] | None:
        """Return the value of a variable, or the variable's default. For a command substitution, return the text with
        variables replaced. Return None if the value is unknown."""
        found = Parameter.read(piece)
        if found is None:
            return self._computed(piece) if piece.startswith(("$(", "`")) else None
        name = found.name
        sign = found.sign
        word = found.word
        known = self.values.get(name)
        if not found.plain and not (found.has_default and found.index in (None, "@", "*")):
            return None if known is None else self._part(found, known)
        missing = known is None or (sign.startswith(":") and not known)
        if sign.endswith("+"):
            return "" if missing else self.word(word)
        if missing and sign.endswith(("-", "=")):
            known = self.word(word)
            if sign.endswith("="):
                self.values[name] = known
        return self._counted(name, known)

    def _part(self, parameter: Parameter, value: str | list[str]) -> str | list[str] | None:
        """Apply a parameter expansion to a known value. Return None if the result cannot be determined."""

        def number(text: str) -> int:
            return evaluate(self.word(text, quoted=True), self._number)

        try:
            part = parameter.part(value, number)
            if parameter.has_default:
                part = part or self.word(parameter.word)
            elif parameter.sign or parameter.length:
                word = parameter.word if parameter.sign == ":" else self.word(parameter.word)
                changed = parameter.changed(part, word, number)
                return None if changed is None else self._counted(parameter.name, changed)
            return self._counted(parameter.name, part)
        except ValueError:
            return None

    def _computed(self, piece: str) -> str:
        """Return the value of an arithmetic substitution such as `$((N * 2))`. For command substitutions, return the
        command with known variables replaced."""
        if piece.startswith("$((") and piece.endswith("))"):
            text = self.word(piece[3:-2], quoted=True)
            try:
                return str(evaluate(text, self._number))
            except ValueError:
                return f"$(({BARE_NAME.sub(self._operand, text)}))"
        inner, at = "", 1
        while (found := piece.find("$((", at)) >= 0:
            try:
                end = span_end(piece, found)
            except ValueError:
                break
            inner += NAME.sub(self._named, piece[at:found]) + self._computed(piece[found:end])
            at = end
        return piece[0] + inner + NAME.sub(self._named, piece[at:])

    def _number(self, name: str) -> str | None:
        """Return the text to which a variable expands in arithmetic. An array expands to its first value."""
        value = self._counted(name, self.values.get(name))
        return value[0] if isinstance(value, list) and value else value if isinstance(value, str) else None

    def _operand(self, found: re.Match[str]) -> str:
        """Return the text that replaces a variable name if the arithmetic around the name cannot be evaluated: the
        variable's value if the script sets it, and otherwise the name itself."""
        text = self._number(found[0])
        return found[0] if text is None else text if text.startswith("$") or text.isdigit() else f"({text or 0})"

    def _named(self, found: re.Match[str]) -> str:
        value = self._counted(found[1] or found[2], self.values.get(found[1] or found[2]))
        return value if isinstance(value, str) else found[0]

    def _counted(self, name: str, value: str | list[str] | None) -> str | list[str] | None:
        """Return the value of a variable. Raises ExpansionError if all values so far have too many characters in
        total."""
        self._expanded += 1 + sum(1 + len(text) for text in listed(value or ""))
        if self._expanded > MOST:
            raise ExpansionError(f"its variables expand to more than {MOST:,} characters, the last one being {name}")
        return value


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _parted(words: list[str], *separators: str) -> Iterator[list[str]]:
    """Split a list of words at separators, and yield the lists in between."""
    part: list[str] = []
    for word in words:
        if word in separators:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def compared(text: str, sign: str, other: str) -> float:
    if UNKNOWN.search(text + other):
        return UNSURE
    if sign in ("=", "==", "!="):
        return float(fnmatchcase(text, other) == (sign != "!="))
    if sign in ("<", ">"):  # compares texts
        return float(text < other if sign == "<" else text > other)
    if sign not in NUMBERS:
        return UNSURE
    try:
        return float(evaluate(f"{int(text)} {NUMBERS[sign]} {int(other)}", lambda name: None))
    except ValueError:  # If the text is not a number, bash prints an error and the test fails.
        return NO
