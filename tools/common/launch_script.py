"""Reads the training command of a shell script without running the script.

Assignments, `if`, `case`, `&&` and `||` are followed as far as the script itself decides them. Variables that it does
not set, and what only a shell computes, stay in the words as they are.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath

CLOSERS = {"'": "'", '"': '"', "`": "`", "${": "}", "$(": ")", "(": ")"}
BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
OPERATOR = re.compile(r"\n|;;&?|;&|;|&&|&|\|\|?&?|\(\s*\)|[()]")
REDIRECTION = re.compile(r"(?:\d*(?:<<<|<<-?|>>|>&|<&|>\||<>|>|<)|&>>?)(?!\()(?:[ \t]|\\\n)*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?[-=+?])(.*))?\}|(\w+))", re.S)
PLAIN_VARIABLE = re.compile(r"\$(?:\d|\w+|[@*#?])")
NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
ALL_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
UNKNOWN = re.compile(r"\$[\w{(@*#?!]|`")
"""Placeholder of an unknown variable, or of a value that only a shell computes."""

MOST = 500_000
"""Most characters that the variables of a script may stand for in all: a variable can double itself in each line."""

DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
PRINTERS = ("echo", "printf")
ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "2>&1", "&>")
"""Words that end a command which a variable holds."""

PROGRAM = re.compile(r"[^\s,:]*(?:\.py|pretrain\w*)")
INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed)")

NUMBERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}
NUMBERS |= {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}

NO, UNSURE, YES = 0.0, 0.5, 1.0
"""Whether a test holds. Not is 1 - x, and is the least, or is the most."""


class ExpansionError(Exception):
    """The variables of a script stand for too much text."""


# Syntax


def span_end(text: str, start: int, quoted: bool = False) -> int:
    """The end of what begins at `start`: a quotation, a substitution, parentheses, or one character. Within double
    quotes (`quoted`) only substitutions are more than a character. Raises ValueError if its end is missing."""
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
    """The quotations, substitutions and single characters of a text."""
    at = 0
    while at < len(text):
        try:
            end = span_end(text, at, quoted)
        except ValueError:
            end = at + 1
        yield text[at:end]
        at = end


def split(value: str) -> list[str]:
    """The fields of a variable's value, without the quotes that are for `eval`."""
    fields, inside = [""], False
    for piece in pieces(value):
        if piece.isspace():
            fields += [""] if inside else []
        else:
            fields[-1] += piece[1:-1] if piece[0] in "'\"" and len(piece) > 1 else piece
        inside = not piece.isspace()
    return fields if fields[-1] or inside else fields[:-1]


def commands(text: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """The commands of a script, those of all branches: words as they stand in it, reserved words too, the operator
    behind them, and here-documents. Raises ValueError if it is no script."""
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
    """The end of the word that begins at `at`. Parentheses belong to it behind =, < and >."""
    while at < len(text):
        nested = text[at] == "(" and text[at - 1] in "=<>"
        if text[at] in " \t\n;&|()<>" and not nested and text[at : at + 2] not in ("<(", ">("):
            break
        at = span_end(text, at)
    return at


# Meaning


@dataclass
class Branch:
    """An `if`, `case`, loop or group that is being read."""

    live: float
    """Whether the commands of its present branch run."""

    taken: float = NO
    """Whether one of the branches so far has run."""

    subject: str = ""
    patterns: list[str] | None = None
    """Of a `case` whose pattern is being read."""

    def enter(self, chosen: float) -> None:
        """Begins a branch that runs if no other did and `chosen` holds."""
        self.live = min(YES - self.taken, chosen)
        self.taken = max(self.taken, chosen)


@dataclass
class LaunchScript:
    """The commands of a shell script, as far as they can be read. Raises ValueError if `text` is no shell script, and
    ExpansionError if its variables stand for more than `MOST` characters."""

    text: str
    values: dict[str, str | list[str]] = field(default_factory=dict)
    started: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: {"pretrain": [], "other": [], "any": []})
    """Words behind the program: of those that train, of other programs in Python, and of commands that are given
    flags by variables."""

    unsure: list[str] = field(default_factory=list)
    """Flags, and assignments that replace others, of branches whose test is not known."""

    _branches: list[Branch] = field(default_factory=list)
    _expanded: int = 0
    """Characters of values that variables have been replaced by."""

    _result: float = YES
    _tested: bool = False
    """Whether the last command was a test: of others the exit code is not known, and taken for success."""

    def __post_init__(self) -> None:
        self._run(self.text.replace("\r\n", "\n"))

    def flags(self) -> list[str]:
        """The words behind the training programs."""
        found = next((found for found in self.started.values() if found), [])
        return [word for words in dict.fromkeys(found) for word in words if word not in ALL_ARGUMENTS]

    def _run(self, text: str) -> None:
        depth, before, guard = len(self._branches), "\n", YES
        for words, then, documents in commands(text):
            guard = {"&&": self._result, "||": YES - self._result, "|": guard}.get(before, YES)
            if not self._in_pattern():
                words = self._reserved(words, guard)
            if self._in_pattern():
                self._pattern(words, then)
            elif words and then != "()":
                self._chain(words, before, min([guard, *(branch.live for branch in self._branches)]))
            if then in (";;", ";&", ";;&") and self._branches:
                self._branches[-1].live, self._branches[-1].patterns = NO, []
            for document in documents:
                with suppress(ValueError):
                    self._run(document)
            before = then
        if len(self._branches) != depth:
            del self._branches[depth:]
            raise ValueError("a branch is not closed")

    def _chain(self, words: list[str], before: str, live: float) -> None:
        """Runs a command; its result and that of the commands before it in a chain of && and || are one."""
        earlier, tested = self._result, words[0] in ("[", "[[", "test", "!") or words[0].startswith("((")
        result = YES if live == NO else self._test(words) if tested else self._simple(words, live)
        chains = {"&&": min(earlier, result), "||": max(earlier, result)}
        self._result = chains.get(before, result)
        self._tested = tested

    def _reserved(self, words: list[str], guard: float) -> list[str]:
        """The rest of a command after the reserved words at its start, which open, change and close branches."""
        while words:
            word, *rest = words
            if word in ("if", "while", "until", "{"):
                self._branches.append(Branch(live=guard))
            elif word == "case":
                self._branches.append(Branch(NO, subject=self._word(rest[0]) if rest else "", patterns=[]))
                return rest[2:]
            elif word in ("for", "select"):
                self._branches.append(Branch(live=guard))
                self.values.pop(rest[0] if rest else "", None)
                return []
            elif word in ("then", "elif", "else", "fi", "done", "}", "esac"):
                if not self._branches:
                    raise ValueError(f"{word} is not expected")
                branch = self._branches[-1]
                if word == "then":
                    branch.enter(self._result if self._tested else UNSURE)
                elif word == "elif":
                    branch.live = YES - branch.taken
                elif word == "else":
                    branch.enter(YES)
                else:
                    self._branches.pop()
            elif word == "function":
                rest = rest[1:]
            elif word != "do":
                break
            words = rest
        return words

    def _in_pattern(self) -> bool:
        return bool(self._branches) and self._branches[-1].patterns is not None

    def _pattern(self, words: list[str], then: str) -> None:
        """Reads patterns of a `case`, up to their parenthesis."""
        branch = self._branches[-1]
        assert branch.patterns is not None
        if words[:1] == ["esac"]:
            self._branches.pop()
            return
        branch.patterns += [self._word(word) for word in words]
        if then == ")":
            branch.enter(max((_compared(branch.subject, "=", pattern) for pattern in branch.patterns), default=NO))
            branch.patterns = None

    def _test(self, words: list[str]) -> float:
        """The result of a test, as far as its words are known."""
        if words[0] == "!":
            return YES - self._test(words[1:]) if words[1:] and words[1][0] in "[(" else UNSURE
        if words[0].startswith("(("):
            found = re.findall(r"[$\w{}]+|[<>=!]=|&&|\|\||\S", words[0][2:-2])
            given = [self._word(f"${word}" if word.isidentifier() else word) for word in found]
        else:
            given = [self._word(word) for word in words[1:] if word not in ("]", "]]")]
        return max(min(map(_clause, _parted(each, "&&", "-a"))) for each in _parted(given, "||", "-o"))

    def _simple(self, words: list[str], live: float) -> float:
        """Runs a simple command: assigns variables, and keeps the words of those that train."""
        declared = words[0] in DECLARATIONS
        if declared:
            words = [word for word in words[1:] if ASSIGNMENT.fullmatch(word)]
        assigned = 0
        while assigned < len(words) and ASSIGNMENT.fullmatch(words[assigned]):
            assigned += 1
        if assigned == len(words):
            for word in words:
                self._assign(word, live)
            return YES
        words = words[assigned:]
        expanded = [field for word in words for field in self._fields(word)]
        if not expanded or expanded[0] in PRINTERS:
            return YES
        start = next((i for i, word in enumerate(expanded) if PROGRAM.fullmatch(word)), None)
        if start is None:
            for text in (word for word in expanded if " " in word.strip() and "--" in word and word not in words):
                with suppress(ValueError):
                    self._run(text)
            start = next((i for i, word in enumerate(expanded) if INTERPRETER.fullmatch(word)), None)
        by_variables = {word for word in expanded if word.startswith("--")} - set(words)
        if start is None and by_variables:
            start = 0
        if start is not None and any("--" in word for word in expanded[start:]):
            kind = "pretrain" if "pretrain" in PurePath(expanded[start]).name else "other" if start else "any"
            kind = "other" if kind == "any" and not by_variables else kind
            self._start(kind, expanded[start + 1 :], live)
        return YES

    def _start(self, kind: str, words: list[str], live: float) -> None:
        end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
        fields = [field for word in words[:end] for field in (split(word) if " " in word and "--" in word else [word])]
        self.started[kind].append(tuple(fields))
        if live == UNSURE:
            self.unsure += [word for word in fields if word.startswith("--")]

    def _assign(self, assignment: str, live: float) -> None:
        found = ASSIGNMENT.fullmatch(assignment)
        assert found
        name, adds, raw = found.groups()
        earlier = self.values.get(name)
        value: str | list[str]
        if raw.startswith("("):
            inner = [word for words, *_ in commands(raw[1:-1]) for word in words]
            value = [field for word in inner for field in self._fields(word)]
        else:
            value = self._word(raw if earlier is not None else re.sub(rf"\$({name}\b|\{{{name}\}})", "", raw))
        new = value if isinstance(value, list) else split(value)
        if live == UNSURE:
            old = split(earlier) if isinstance(earlier, str) else earlier or []
            flags = [word for word in new if word.startswith("--") and word not in old]
            replaces = earlier not in (None, value) and not adds and "--" not in "".join(new)
            self.unsure += flags or ([f"{name}={value}"] if replaces else [])
        if adds and earlier is not None:
            both_text = isinstance(earlier, str) and isinstance(value, str)
            value = f"{earlier}{value}" if both_text else [*_listed(earlier), *new]
        self.values[name] = value

    # Words

    def _fields(self, word: str) -> list[str]:
        """The fields that a word becomes: variables outside quotes, and whole arrays, become several."""
        fields = [""]
        quotes = False
        for piece in pieces(word):
            if piece.startswith('"$') and "[@]" in piece and piece.endswith('}"'):
                value = self._value(piece[1:-1])
                parts = [piece[1:-1]] if value is None else _listed(value)
            elif piece[0] in "$`":
                value = self._value(piece)
                parts = [piece] if value is None else split(value) if isinstance(value, str) else value
            else:
                parts, quotes = [self._word(piece)], True
            fields[-1] += parts[0] if parts else ""
            fields += parts[1:]
        return fields if quotes or fields != [""] else []

    def _word(self, word: str, quoted: bool = False) -> str:
        """A word without its quotes, and with the values of variables that are known."""
        found = []
        for piece in pieces(word, quoted):
            if piece[0] in "$`" and (value := self._value(piece)) is not None:
                found.append(" ".join(_listed(value)))
            elif len(piece) > 1 and piece[0] in "'\"":
                found.append(self._word(piece[1:-1], quoted=True) if piece[0] == '"' else piece[1:-1])
            elif piece[0] == "\\" and (not quoted or piece[1:] in ("\n", '"', "\\", "$", "`")):
                found.append(piece[1:].strip("\n"))
            else:
                found.append(piece)
        return "".join(found)

    def _value(self, piece: str) -> str | list[str] | None:
        """The value of a variable or its default, or what only a shell computes with the variables in it replaced; None
        if it is not known."""
        found = VARIABLE.fullmatch(piece)
        if not found:
            return NAME.sub(self._named, piece) if piece.startswith(("$(", "`")) else None
        name, sign, word = found[1] or found[4], found[2] or "", found[3] or ""
        known = self.values.get(name)
        missing = known is None or (sign.startswith(":") and not known)
        if sign.endswith("+"):
            return "" if missing else self._word(word)
        if missing and sign.endswith(("-", "=")):
            known = self._word(word)
            if sign.endswith("="):
                self.values[name] = known
        return self._counted(name, known)

    def _named(self, found: re.Match[str]) -> str:
        value = self._counted(found[1] or found[2], self.values.get(found[1] or found[2]))
        return value if isinstance(value, str) else found[0]

    def _counted(self, name: str, value: str | list[str] | None) -> str | list[str] | None:
        """The value of a variable. Raises ExpansionError if all values so far are too long."""
        self._expanded += 1 + sum(1 + len(text) for text in _listed(value or ""))
        if self._expanded > MOST:
            raise ExpansionError(f"its variables stand for more than {MOST:,} characters, at last {name}")
        return value


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _parted(words: list[str], *separators: str) -> Iterator[list[str]]:
    """Words between those that separate."""
    part: list[str] = []
    for word in words:
        if word in separators:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _clause(words: list[str]) -> float:
    """The result of one comparison."""
    match words:
        case ["!", *rest]:
            return YES - _clause(rest)
        case ["-z", text]:
            return YES - _clause([text])
        case ["-n", text] | [text]:
            return UNSURE if UNKNOWN.search(text) else float(bool(text))
        case [text, sign, other]:
            return _compared(text, sign, other)
    return UNSURE


def _compared(text: str, sign: str, other: str) -> float:
    if UNKNOWN.search(text + other):
        return UNSURE
    if sign in ("=", "==", "!="):
        return float(fnmatchcase(text, other) == (sign != "!="))
    try:
        return float(NUMBERS[sign](int(text), int(other)))
    except (KeyError, ValueError):  # no comparison, or no numbers
        return UNSURE


def quoted(word: str) -> str:
    """A word as it can be pasted into a shell that knows the variables in it."""
    if not UNKNOWN.search(word):
        return shlex.quote(word)
    escaped = (
        piece if UNKNOWN.match(piece) else re.sub(r'(["\\])', r"\\\1", piece) for piece in pieces(word, quoted=True)
    )
    return f'"{"".join(escaped)}"'
