"""Read the training command of a shell script without running the script.

Assignments, arithmetic, `if`, `case`, `&&` and `||` are evaluated as far as the script itself determines the result.
A variable that the script does not set counts as unset in tests, unless the environment may set it. Variables that the
script does not set, and values that only a shell can compute, stay unchanged in the words of a command.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath

from .shell_variables import NO, UNSURE, YES, ShellVariables, compared, listed
from .shell_words import commands, pieces, split

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
CALCULATION = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.S)
"""Pattern of an arithmetic assignment such as `N += 1` in `let` or `((...))`."""

STEP = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")
"""Pattern of a variable's increment or decrement in arithmetic."""

ALL_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
PRINTERS = ("echo", "printf")
ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "2>&1", "&>")
"""Words after which the text of a variable no longer belongs to the command."""

SETS_NONE = re.compile(r"conda|activate$|rc$|profile$")
"""Pattern for the names of sourced scripts, such as `.bashrc`, which do not set variables that launch scripts test."""

PROGRAM = re.compile(r"[^\s,:]*(?:\.py|pretrain\w*)")
INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed)")


@dataclass
class Branch:
    """State of an `if`, `case`, loop or group while its commands are read."""

    live: float
    """`YES` if the commands that are being read are executed, `NO` if they are skipped, and `UNSURE` if this is
    unknown."""

    taken: float = NO
    """`YES` if an earlier branch of the same `if` or `case` has run."""

    subject: str = ""
    patterns: list[str] | None = None
    """Patterns of the current `case` branch while they are read; None otherwise."""

    repeats: bool = False
    """True if this branch is the body of a loop, which may run several times."""

    def enter(self, chosen: float) -> None:
        """Begin a branch. The branch runs if its condition `chosen` is true and no earlier branch of the same construct
        has run."""
        self.live = min(YES - self.taken, chosen)
        self.taken = max(self.taken, chosen)


@dataclass
class LaunchScript:
    """Interpreter for launch scripts that evaluates assignments and conditions, and records the commands that start
    programs. Raises ValueError if `text` is not a shell script. Raises ExpansionError if the variables expand to more
    than `MOST` characters in total."""

    text: str
    variables: ShellVariables = field(default_factory=ShellVariables)
    started: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: {"pretrain": [], "other": [], "any": []})
    """Arguments of each recorded command, keyed by the kind of command: "pretrain" for training programs, "other" for
    other Python programs, and "any" for commands whose flags come from variables."""

    unsure: list[str] = field(default_factory=list)
    """Flags in branches whose condition is unknown."""

    choices: dict[str, list[str]] = field(default_factory=dict)
    """Possible values of each variable whose assignment depends on an unknown test. In recorded commands, such a
    variable is replaced with its last possible value."""

    _branches: list[Branch] = field(default_factory=list)
    _result: float = YES
    _tested: bool = False
    """True if the last command was a test. Other commands have unknown exit codes, and are assumed to succeed."""

    def __post_init__(self) -> None:
        self._run(self.text.replace("\r\n", "\n"))

    def flags(self) -> list[str]:
        """Return the arguments of the training program. If several commands start the program, return the arguments of
        all of these commands."""
        found = next((found for found in self.started.values() if found), [])
        return [word for words in dict.fromkeys(found) for word in words if word not in ALL_ARGUMENTS]

    def _run(self, text: str) -> None:
        depth = len(self._branches)
        before = "\n"
        guard = YES
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
        """Interpret a command, and combine its result with those of earlier commands in the same chain of && and ||."""
        words = _calculations(words)
        for found in map(ASSIGNMENT.fullmatch, words if live == NO else ()):
            if found and "--" in found[3]:  # The skipped assignment would have set flags, so the variable is empty.
                self.variables.values.setdefault(found[1], "")
        earlier, tested = self._result, words[0] in ("[", "[[", "test", "!") or words[0].startswith("((")
        result = YES if live == NO else self.variables.test(words) if tested else self._simple(words, live)
        chains = {"&&": min(earlier, result), "||": max(earlier, result)}
        self._result = chains.get(before, result)
        self._tested = tested

    def _reserved(self, words: list[str], guard: float) -> list[str]:
        """Process reserved words such as `if`, `else` and `fi` at the start of a command, which begin, switch or end a
        branch. Return the words of the command that follow the reserved words."""
        while words:
            word, *rest = words
            if word in ("if", "while", "until", "{"):
                self._branches.append(Branch(live=guard, repeats=word in ("while", "until")))
            elif word == "case":
                self._branches.append(
                    Branch(NO, subject=self.variables.tested_text(rest[0]) if rest else "", patterns=[])
                )
                return rest[2:]
            elif word in ("for", "select"):
                self._branches.append(Branch(live=guard, repeats=True))
                self.variables.forget(re.findall(r"[A-Za-z_]\w*", rest[0])[:1] if rest else [])
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
        """Read the patterns of a `case` branch, up to the closing parenthesis."""
        branch = self._branches[-1]
        assert branch.patterns is not None
        if words[:1] == ["esac"]:
            self._branches.pop()
            return
        branch.patterns += [self.variables.word(word) for word in words]
        if then == ")":
            branch.enter(max((compared(branch.subject, "=", pattern) for pattern in branch.patterns), default=NO))
            branch.patterns = None

    def _simple(self, words: list[str], live: float) -> float:
        """Interpret a command without reserved words. The assignments of the command set variables, and the arguments
        of commands that start training are recorded."""
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
        if words[0] in ("source", ".", "eval"):
            self.variables.sources |= not SETS_NONE.search(" ".join(words[:2]))
        elif words[0] in ("read", "mapfile", "readarray", "getopts"):
            self.variables.forget([word for word in words[1:] if word.isidentifier()])
        elif words[0] == "unset" and live == YES:
            for word in words[1:]:
                self.variables.values.pop(word, None)
        expanded = [field for word in words for field in self.variables.fields(word)]
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
        if "$((" in raw and re.search(rf"\b{name}\b", raw) and any(branch.repeats for branch in self._branches):
            self.variables.forget([name])  # A loop changes this counter, so its value is unknown.
        earlier = self.variables.values.get(name)
        value: str | list[str]
        if raw.startswith("("):
            inner = [word for words, *_ in commands(raw[1:-1]) for word in words]
            value = [field for word in inner for field in self.variables.fields(word)]
        else:
            value = self.variables.word(raw if earlier is not None else re.sub(rf"\$({name}\b|\{{{name}\}})", "", raw))
        new = value if isinstance(value, list) else split(value)
        if live == UNSURE:
            old = split(earlier) if isinstance(earlier, str) else earlier or []
            flags = [word for word in new if word.startswith("--") and word not in old]
            self.unsure += flags
            texts = [" ".join(listed(each)) for each in (earlier or [], value)]
            if earlier not in (None, value) and not adds and not texts[1].startswith(texts[0]):
                self.choices[name] = [*self.choices.get(name, texts[:1]), texts[1]]
        if adds and earlier is not None:
            both_text = isinstance(earlier, str) and isinstance(value, str)
            value = f"{earlier}{value}" if both_text else [*listed(earlier), *new]
        self.variables.values[name] = value


def _calculations(words: list[str]) -> list[str]:
    """Convert arithmetic assignments in `let` and `((...))` to shell assignments. Other commands are returned
    unchanged."""
    inner = words[1:] if words[0] == "let" else [words[0][2:-2]] if words[0].startswith("((") else []
    texts = [text for each in inner for text in _between_commas(each.strip("'\""))]
    found = [CALCULATION.fullmatch(STEP.sub(_as_sum, text) if STEP.fullmatch(text) else text) for text in texts]
    if not found or not all(found):
        return words
    parts = [each.groups() for each in found if each]
    return [f"{name}=$(({f'{name} {sign} ({text})' if sign else text}))" for name, sign, text in parts]


def _as_sum(step: re.Match[str]) -> str:
    """Convert `N++` and `--N` to assignments."""
    return f"{step[1] or step[4]} {(step[2] or step[3])[0]}= 1"


def _between_commas(text: str) -> list[str]:
    """Split arithmetic text at its commas."""
    parts = [""]
    for piece in pieces(text):
        parts[-1:] = [parts[-1], ""] if piece == "," else [parts[-1] + piece]
    return parts
