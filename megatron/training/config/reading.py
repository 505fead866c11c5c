"""Convert flags from a command line or a YAML file to field values. This module does not import torch.

Every flag has one of four outcomes: it sets a field, it is replaced with other flags, it has no effect, or it is a
problem. The notes of a run and `tools/translate_flags.py` print the outcomes (`Reading`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from megatron.core.registry import NoFacts, Registry
from megatron.training.config.code_record import standing
from megatron.training.config.commands import GivenOptions, options
from megatron.training.config.flags import Flag, all_flags, field_table, home_of, spelling_table
from megatron.training.config.problem import Problem, path_rule, text_rule
from megatron.training.config.run_config import RunConfig
from megatron.training.config.yaml_text import compose, plain, texts_of

SAID_OF_SWITCHES = {"true": True, "false": False}
"""Values that a switch accepts, both on a command line and in a file."""


@dataclass(frozen=True)
class Reading:
    """Result of reading one flag of a command line."""

    given: tuple[str, ...]
    """The flag as given on the command line, followed by its values."""

    ours: tuple[str, ...]
    """This program's flags that replace the given flag; empty if that flag has no effect or is a problem."""

    why: str = ""
    """Reason why the flags in `ours` differ from those in `given`, or an empty string if they are equal."""

    problem: bool = False

    def __str__(self) -> str:
        given = " ".join(self.given)
        return f"{given} is read as {' '.join(self.ours)}" if self.ours else f"{given} has no effect: {self.why}"


class ForeignProgram(Protocol):
    """Another training program. A subclass lists the other program's flags and values that this program lacks, and
    describes how the results of the two programs differ.

    @FOREIGN_PROGRAMS.register("Theirs")
    class Theirs(ForeignProgram): ...
    """

    def spellings(self) -> Collection[str]:
        """Return the flags of the other program for which this program has no field."""

    def read(self, reader: FlagReader, name: str, texts: list[str]) -> bool:
        """Translate a flag of the other program for `reader`. Return False if the other program lacks the flag."""

    def feature(self, flag: str, texts: Sequence[str]) -> str | None:
        """Return the unsupported feature that the flag selects with these values, or None if it is supported."""

    def examples(self, tokens: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
        """Map each file in examples/ that registers unknown flags to one of these flags."""

    def differences(self, config: RunConfig, given: Collection[str]) -> Iterable[str]:
        """Yield lines that describe how the results of this program, for a resolved configuration, differ from the
        results of the other program.

        `given` contains each given flag twice: alone, and with its first value, such as "--tp 2". Flags without a field
        are included in `given`."""


FOREIGN_PROGRAMS: Registry[ForeignProgram, NoFacts, []] = Registry("program", NoFacts, protocol=ForeignProgram)
"""Other programs whose flags are recognized. The module for another program is imported only if no configuration field
accepts a given flag or value."""


def foreign_programs() -> dict[str, ForeignProgram]:
    """Return the registered other programs, keyed by name."""
    return {name: FOREIGN_PROGRAMS[name] for name in FOREIGN_PROGRAMS}


def foreign_spellings() -> set[str]:
    """Return the spellings of all flags of other programs."""
    return {each for program in foreign_programs().values() for each in program.spellings()}


def foreign_examples(unknown: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """Map each file in examples/ that registers unknown flags to one of these flags."""
    return dict(chain(*(program.examples(unknown).items() for program in foreign_programs().values())))


@dataclass
class FlagReader(GivenOptions):
    """Reader that collects the values of flags, and all problems with these values."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    """Spelling of the flag, or entry of a file, that most recently set each field."""

    sources: dict[str, str] = field(default_factory=dict)
    """Path of the file that most recently set each field, keyed by field name."""

    notes: list[str] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    """Flags that are not reported as missing, because the user probably misspelled them or gave an invalid value."""

    readings: list[Reading] = field(default_factory=list)
    spelled: set[str] = field(default_factory=set)
    """Spellings of all given flags. The set contains each flag twice: alone, and with its first value, such as "--tp
    2"."""

    settings: list[Callable[[], None]] = field(default_factory=list)
    """Functions that interpret flags whose meaning depends on other flags. After all flags of a command line or
    configuration file are read, the reader calls these functions."""

    exchanges: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call after all flags and files are read, each of which changes the value of another flag."""

    def raise_problems(self) -> None:
        """Raise ValueError with every problem, one per line."""
        if self.problems:
            raise ValueError("\n".join(map(str, self.problems)))

    def read_all(self, tokens: Sequence[tuple[str, list[str]]]) -> None:
        """Read a whole command line. Each token is a pair (flag, its values)."""
        for name, texts in tokens:
            self.read(name, texts)
        self.finish()

    def read(self, name: str, texts: list[str]) -> None:
        """Read one flag. After the last flag, call `finish`."""
        if not name.startswith("--"):
            self.problems.append(Problem(name, None, "is not a flag", "flags begin with two dashes"))
            return
        name = known_spelling(name)
        self.spelled |= {name, " ".join([name, *texts[:1]])}
        self.read_known(name, texts)

    def read_known(self, name: str, texts: list[str]) -> None:
        """Read a flag whose spelling is known: an option, a configuration field, or a flag of another program."""
        flag, _ = spelling_table().get(name, (None, True))
        if _is_switch(flag, name):
            texts = [text for text in texts if not text.isspace()]
        if name in options():
            self._option(name, texts)
        elif flag is not None and (not flag.spec.choices or all(text in flag.spec.choices for text in texts)):
            self.read_field(name, texts, texts)  # the code for other programs is not imported
        elif not any(program.read(self, name, texts) for program in foreign_programs().values()):
            self._unknown(name, texts) if flag is None else self.read_field(name, texts, texts)

    def finish(self) -> None:
        """Finish reading one source of flags, such as a file."""
        for judge in self.settings:
            judge()
        self.settings.clear()

    def read_field(self, name: str, texts: Sequence[str], given: Sequence[str]) -> None:
        """Read a flag that sets a configuration field. `given` contains the values that the user wrote, and `texts`
        contains this program's names for these values."""
        flag, on = spelling_table()[name]
        before = len(self.problems)
        if flag.kind is not bool:
            self.set_value(flag, name, texts)
        elif len(texts) == 1 and texts[0].lower() in SAID_OF_SWITCHES:
            self.set(flag, name, on == SAID_OF_SWITCHES[texts[0].lower()])
        elif texts:
            self.wrong(flag, name, texts, "takes no value except true or false", "write the flag alone")
        else:
            self.set(flag, name, on)
        why = "; ".join(map(str, self.problems[before:])) or ("" if texts == given else "another name for the value")
        self.readings.append(Reading((name, *given), (name, *texts), why, len(self.problems) > before))

    def _option(self, name: str, texts: list[str]) -> None:
        legal = options()[name].values
        if len(texts) not in legal:
            rule = {(0,): "takes no value", (1,): "takes one value", (0, 1): "takes one value or none"}[legal]
            self.problems.append(Problem(name, tuple(texts) or None, rule, f"given: {len(texts)}"))
            return
        if broken := next(filter(None, map(text_rule, texts)), None):
            self.problems.append(Problem(name, tuple(texts), *broken))
            return
        self.options.setdefault(name, []).extend(texts or [""])

    @property
    def world_size(self) -> int | None:
        """Value of --world-size. If the value is not an integer above 0, it is discarded and a problem is reported."""
        return self.number("--world-size", "say how many ranks")

    def refuse(self, name: str, texts: Sequence[str], rule: str, remedy: str) -> None:
        """Add a problem with a flag to which no field corresponds."""
        self.problems.append(Problem(name, tuple(texts) or None, rule, remedy))
        self.readings.append(Reading((name, *texts), (), f"{rule}; {remedy}", problem=True))

    def _unknown(self, name: str, texts: list[str]) -> None:
        """Report an unknown flag. Suggest a known name only if that name resembles or begins with the given name."""
        import difflib

        if (home := home_of(name)) is not None:
            self.refuse(name, texts, f"is a flag of the extension {home}, which is not installed", _restore(home))
            return
        known = [*spelling_table(), *foreign_spellings(), *options()]
        plain = "--" + name.lstrip("-").replace("_", "-").lower()
        close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1, cutoff=0.85)
        close = close or sorted((each for each in spelling_table() if each.startswith(f"{plain}-")), key=len)
        nobody = " nor ".join(["neither this program", *FOREIGN_PROGRAMS]) if FOREIGN_PROGRAMS else "no extension"
        remedy = f"did you mean {close[0]}?" if close else f"{nobody} has this flag; remove it"
        self.refuse(name, texts, "unknown flag", remedy)
        if close and close[0] in spelling_table():
            self.suspects.add(spelling_table()[close[0]][0].name)

    # Values of fields

    def set_value(self, flag: Flag, name: str, texts: Sequence[str]) -> None:
        """Convert a flag's arguments to a value, and set the field to this value if it is valid."""
        try:
            value = legal_value(flag, texts)
        except IllegalValueError as illegal:
            self.wrong(flag, name, illegal.texts, illegal.rule, illegal.remedy)
        else:
            self.set(flag, name, value)

    def set(self, flag: Flag, name: str, value: object) -> None:
        """Set the value of a flag's field. If a flag is given several times, the last value applies, because launch
        scripts append overrides. A note is added if the values differ.

        If a flag is repeatable, collect the values from all its occurrences."""
        if flag.spec.repeats and isinstance(value, tuple):
            value = (*(self.values[flag.field] if flag.field in self.given else ()), *value)
        elif flag.field in self.given and self.values.get(flag.field) != value:
            first = self.given[flag.field]
            both = f"{name} is given twice" if first == name else f"{first} and {name} are both given"
            self.notes.append(f"{both}, with different values: the last one, {name}{_shown(value)}, counts")
        self.values[flag.field] = value
        self.given[flag.field] = name

    def wrong(self, flag: Flag, name: str, texts: Sequence[str], rule: str, remedy: str) -> None:
        """Add a problem with a field's value."""
        self.problems.append(Problem(name, tuple(texts) or None, rule, remedy))
        self.suspects.add(flag.name)

    # Files

    def read_file(self, path: str) -> None:
        """Read flags from a YAML file: a flat mapping whose keys are names of flags or fields, with dashes or
        underscores."""
        try:
            node = compose(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            self.problems.append(Problem("--config", path, f"cannot be read: {why}", "give a readable YAML file"))
            return
        if node is None:
            return
        if not node.tag.endswith(":map"):
            self.problems.append(Problem("--config", path, "must be a mapping", "write one `name: value` per line"))
            return
        earlier = self.values
        self.values = {}
        self.given = {}
        for key, value in node.value:
            self.read_entry(path, str(key.value), plain(value))
        self.finish()
        self.sources |= dict.fromkeys(self.values, path)
        self.values = overridden(earlier, self.values)

    def refuse_unrecorded_code(self, replaced: Collection[str]) -> None:
        """Add a problem for each value in a configuration file that names code, unless a run of this user has recorded
        the code. The fields in `replaced` are not checked."""
        for name in self.values.keys() & self.sources.keys() - set(replaced):
            flag = field_table()[name]
            path = self.sources[name]
            values = self.values[name]
            texts = values if isinstance(values, tuple) else (values,)
            named = [text for text in texts if flag.spec.names_code is not None and flag.spec.names_code(text)]
            if refused := [text for text in named if standing(path, text) != "recorded"]:
                rule = "may run code, and code runs only if the command line names it"
                remedy = f"read the files, then add {flag.name} {' '.join(texts)}"
                self.wrong(flag, f"{path}: {flag.name[2:]}", refused, rule, remedy)

    def read_entry(self, path: str, key: str, value: object) -> None:
        """Read one entry of the mapping in the file `path`: its key and its plain value."""
        name = "--" + key.lstrip("-").replace("_", "-")
        where = f"{path}: {key}"
        flag, on = spelling_table().get(name, (None, True))
        if value not in (None, False):
            self.spelled.add(name)
        if name in options():
            self.problems.append(Problem(where, None, "is not configuration", "give it on the command line"))
        elif isinstance(value, dict):
            rule, remedy = "must be a value, or a list of values", "write flat names, without sections"
            self.problems.append(Problem(where, None, rule, remedy))
        elif flag is None:
            if value not in (None, False):  # a flag that is false in the file counts as not given
                before = len(self.problems)
                self.read(name, [] if value is True else texts_of(value))
                new = self.problems[before:]
                self.problems[before:] = [replace(p, flag=where) if p.flag == name else p for p in new]
        elif flag.field in self.given:
            rule = f"the file contains it twice, also as {self.given[flag.field]}"
            self.wrong(flag, where, texts_of(value), rule, "drop one")
        elif value is not None:
            if flag.kind is not bool:
                self.set_value(flag, where, texts_of(value))
                self.given[flag.field] = name
            elif isinstance(value, bool):
                self.set(flag, name, value == on)
            else:
                self.wrong(flag, where, texts_of(value), "must be true or false", "correct the file")


def settings_in_other_units() -> dict[str, list[str]]:
    """Return groups of fields that express the same setting in different units, keyed by the first field of each
    group."""
    groups: dict[str, list[str]] = {}
    for flag in all_flags():
        if (first := flag.spec.same_setting_as) is not None:
            groups.setdefault(first, [first]).append(flag.field)
    return groups


def overridden(earlier: dict[str, object], later: dict[str, object]) -> dict[str, object]:
    """Merge the values of two sources of flags. Values in `later` take precedence over values in `earlier`, even if
    they express the same setting in different units, such as iterations and samples."""
    groups = settings_in_other_units().values()
    replaced = {field for group in groups if not later.keys().isdisjoint(group) for field in group}
    return {field: value for field, value in earlier.items() if field not in replaced} | later


def tokens_of(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with its values: the text after `=`, if any, and all tokens up to the next flag.

    A token before the first flag, which does not begin with two dashes, is yielded as if it were a flag without values.
    A quoted value that consists of white space is ignored, unless it is the first value of a flag."""
    current: tuple[str, list[str]] | None = None
    for token in argv:
        if token.isspace() and (current is None or any(map(str.strip, current[1]))):
            continue
        if token.startswith("--"):
            if current:
                yield current
            name, equals, value = token.partition("=")
            current = (name, [value] if equals else [])
        elif current:
            current[1].append(token)
        else:
            yield token, []
    if current:
        yield current


def known_spelling(name: str) -> str:
    """Return `name` if it is a known flag. If `name` is unknown, try dashes instead of underscores, and `--no-` instead
    of `--disable-`."""
    dashes = "--" + name[2:].replace("_", "-")
    for spelling in (name, dashes, dashes.replace("--disable-", "--no-", 1)):
        if spelling in options() or spelling in spelling_table():
            return spelling
    found = foreign_spellings()
    return next((each for each in (name, dashes, dashes.replace("--disable-", "--no-", 1)) if each in found), dashes)


def _is_switch(flag: Flag | None, name: str) -> bool:
    """Return True if the flag accepts no value."""
    return flag.kind is bool if flag is not None else name not in options() or options()[name].values == (0,)


class IllegalValueError(ValueError):
    """Raised if the arguments of a flag are not valid for the flag's field."""

    def __init__(self, texts: Sequence[str], rule: str, remedy: str) -> None:
        super().__init__(rule)
        self.texts = texts
        self.rule = rule
        self.remedy = remedy


def legal_value(flag: Flag, texts: Sequence[str]) -> object:
    """Convert the arguments of a flag to the value of its field. Raises IllegalValueError."""
    if flag.spec.empty_is_none and list(texts) == [""]:
        return None
    _check_number_of_values(flag, texts)
    _check_each(texts, text_rule)
    try:
        value = flag.convert(texts)
    except ValueError as error:
        example = "2, 1_000_000 or 1e6" if flag.kind is int else "0.1 or 1e-4"
        raise IllegalValueError(texts, str(error), f"for example {example}") from None
    if flag.spec.path is not None:  # check the path before anything opens it
        _check_each(texts, partial(path_rule, flag.spec.path))
    if flag.spec.choices is not None:
        values = value if isinstance(value, tuple) else (value,)
        if illegal := [each for each in values if each not in flag.spec.choices]:
            raise _no_choice(flag, texts, str(illegal[0]))
    return value


def _check_number_of_values(flag: Flag, texts: Sequence[str]) -> None:
    if len(texts) == 1 or (texts and flag.takes_several):
        return
    rule = "takes one or more values" if flag.spec.many else "takes one value"
    if not texts:
        raise IllegalValueError(texts, rule, "write it after the flag")
    if feature := _feature(flag, texts):
        raise IllegalValueError(texts, f"asks for {feature}, which is not implemented", "give one value")
    raise IllegalValueError(texts, rule, f"given: {len(texts)}")


def _check_each(texts: Sequence[str], rule_of: Callable[[str], tuple[str, str] | None]) -> None:
    for text in texts:
        if (broken := rule_of(text)) is not None:
            raise IllegalValueError([text], *broken)


def _no_choice(flag: Flag, texts: Sequence[str], illegal: str) -> IllegalValueError:
    """Return the error for a value that is not among the choices of a flag.

    The error says whether the value belongs to another program, needs an extension to be installed, or is unknown.
    """
    import difflib

    choices = list(map(str, flag.spec.choices or ()))
    if feature := _feature(flag, [illegal]):
        return IllegalValueError(texts, f"asks for {feature}, which is not implemented", f"use {' or '.join(choices)}")
    if (home := home_of(f"{flag.name}={illegal}")) is not None:
        rule = f"is a value of the extension {home}, which is not installed"
        return IllegalValueError(texts, rule, f"{_restore(home)}; without it: {', '.join(choices)}")
    if not choices:
        rule = "must name a part, but none is registered"
        return IllegalValueError(texts, rule, "give the --extension that registers it")
    in_lower_case = {choice.lower(): choice for choice in reversed(choices)}
    close = difflib.get_close_matches(illegal.lower(), [choice.lower() for choice in choices], n=1, cutoff=0.6)
    remedy = f"nearest: {in_lower_case[close[0]]}" if close else "pick one of them"
    return IllegalValueError(texts, f"must be one of {', '.join(choices)}", remedy)


def _feature(flag: Flag, texts: Sequence[str]) -> str | None:
    """Return the unsupported feature of another program that the values `texts` of `flag` select, if any."""
    return next(filter(None, (program.feature(flag.name, texts) for program in foreign_programs().values())), None)


def _shown(value: object) -> str:
    """Format a value as it appears after its flag; empty for a switch."""
    values = value if isinstance(value, tuple) else (value,)
    return "" if isinstance(value, bool) else "".join(f" {v}" for v in values)


def _restore(extension: str) -> str:
    return f"restore megatron/extensions/*/{extension} and its line in megatron/extensions/__init__.py, or remove it"
