"""Reads flags from a command line or a YAML file into the values of fields. No torch.

Every flag ends in one of four ways: it sets a field, it stands for other flags, it has no effect, or it is a problem.
Each is kept as a `Reading`, which notes and `tools/translate_flags.py` print."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.training.config.code_record import standing
from megatron.training.config.commands import GivenOptions, options
from megatron.training.config.flags import Flag, all_flags, field_table, home_of, spelling_table
from megatron.training.config.foreign_flags import FLAG_TABLES, flag_tables
from megatron.training.config.problem import Problem, path_rule, text_rule
from megatron.training.config.yaml_text import compose_yaml, read_yaml_file

SAID_OF_SWITCHES = {"true": True, "false": False}
"""Values that a switch may have on a command line, as it may in a file."""


@dataclass(frozen=True)
class Reading:
    """The reading of one flag as it was given."""

    given: tuple[str, ...]
    """The flag and its values."""

    ours: tuple[str, ...]
    """The flags and values that it is read as; empty if it has no effect or is a problem."""

    why: str = ""
    """Why it differs from what was given; empty if it does not."""

    problem: bool = False

    def __str__(self) -> str:
        given = " ".join(self.given)
        return f"{given} is read as {' '.join(self.ours)}" if self.ours else f"{given} has no effect: {self.why}"


@dataclass
class FlagReader(GivenOptions):
    """Collects the values that flags give, and every problem with them."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    """Field -> the spelling or place that set it last."""

    sources: dict[str, str] = field(default_factory=dict)
    """Field -> the file that set it last."""

    notes: list[str] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    """Flags that were probably meant, or given with a bad value: reporting them as missing would be no use."""

    readings: list[Reading] = field(default_factory=list)
    spelled: set[str] = field(default_factory=set)
    """Every flag that was given, alone and with its first value."""

    settings: list[Callable[[], None]] = field(default_factory=list)
    """Called once all flags of a source are read: flags that can be judged only then."""

    exchanges: list[Callable[[], None]] = field(default_factory=list)
    """Called once all sources are read: switches that replace values of any source and in any order."""

    def raise_problems(self) -> None:
        """Raises ValueError with every problem, one a line."""
        if self.problems:
            raise ValueError("\n".join(map(str, self.problems)))

    def read_all(self, tokens: Sequence[tuple[str, list[str]]]) -> None:
        """Reads a whole command line, as (flag, its values)."""
        for name, texts in tokens:
            self.read(name, texts)
        self.finish()

    def read(self, name: str, texts: list[str]) -> None:
        """Reads one flag. `finish` is due after the last one."""
        if not name.startswith("--"):
            self.problems.append(Problem(name, None, "is not a flag", "flags begin with two dashes"))
            return
        name = known_spelling(name)
        self.spelled |= {name, " ".join([name, *texts[:1]])}
        self.read_known(name, texts)

    def read_known(self, name: str, texts: list[str]) -> None:
        """Reads a flag by a spelling that is known, if any is: of an option, a field, or another program."""
        flag, _ = spelling_table().get(name, (None, True))
        if _is_switch(flag, name):
            texts = [text for text in texts if not text.isspace()]
        if name in options():
            self._option(name, texts)
        elif flag is not None and (not flag.spec.choices or all(text in flag.spec.choices for text in texts)):
            self.read_field(name, texts, texts)  # most runs never read the tables
        elif not any(table.read(self, name, texts) for table in flag_tables()):
            self._unknown(name, texts) if flag is None else self.read_field(name, texts, texts)

    def finish(self) -> None:
        """Ends a source of flags."""
        for judge in self.settings:
            judge()
        self.settings.clear()

    def read_field(self, name: str, texts: Sequence[str], given: Sequence[str]) -> None:
        """Reads the flag of a field, with values that may stand for those `given`."""
        flag, on = spelling_table()[name]
        before = len(self.problems)
        if flag.kind is not bool:
            self.set_value(flag, name, texts)
        elif len(texts) == 1 and texts[0].lower() in SAID_OF_SWITCHES:
            self.set(flag, name, on == SAID_OF_SWITCHES[texts[0].lower()])
        elif texts:
            self.wrong(flag, name, texts, "takes no value but true or false", "give the flag alone")
        else:
            self.set(flag, name, on)
        why = "; ".join(map(str, self.problems[before:])) or ("" if texts == given else "another name of the value")
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
        """--world-size. A value that is no number above 0 becomes a problem and is forgotten."""
        return self.number("--world-size", "say how many ranks")

    def refuse(self, name: str, texts: Sequence[str], rule: str, remedy: str) -> None:
        """Adds a problem with a flag that no field has."""
        self.problems.append(Problem(name, tuple(texts) or None, rule, remedy))
        self.readings.append(Reading((name, *texts), (), f"{rule}; {remedy}", problem=True))

    def _unknown(self, name: str, texts: list[str]) -> None:
        """An unknown flag. A suggestion is for typing errors, so it must be close, or for the rest of a name."""
        import difflib

        if (home := home_of(name)) is not None:
            self.refuse(name, texts, f"is a flag of the extension {home}, which is not installed", _restore(home))
            return
        known = [*spelling_table(), *(each for table in flag_tables() for each in table.spellings()), *options()]
        plain = "--" + name.lstrip("-").replace("_", "-").lower()
        close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1, cutoff=0.85)
        close = close or sorted((each for each in spelling_table() if each.startswith(f"{plain}-")), key=len)
        nobody = " nor ".join(["neither this program", *FLAG_TABLES]) if FLAG_TABLES else "no extension"
        remedy = f"did you mean {close[0]}?" if close else f"{nobody} has it; remove it"
        self.refuse(name, texts, "unknown flag", remedy)
        if close and close[0] in spelling_table():
            self.suspects.add(spelling_table()[close[0]][0].name)

    # Values of fields

    def set_value(self, flag: Flag, name: str, texts: Sequence[str]) -> None:
        """Converts the text of a field's value, and sets it unless it is not legal."""
        if not texts or (len(texts) > 1 and not flag.takes_several):
            rule = "takes one or more values" if flag.spec.many else "takes one value"
            remedy = f"given: {len(texts)}" if texts else "write it behind the flag"
            if texts and (feature := _feature(flag, texts)):
                rule, remedy = f"asks for {feature}, which is not built", "give one value"
            self.wrong(flag, name, texts, rule, remedy)
            return
        if flag.spec.empty_is_none and list(texts) == [""]:
            self.set(flag, name, None)
            return
        for text in texts:
            if (broken := text_rule(text)) is not None:
                self.wrong(flag, name, [text], *broken)
                return
        try:
            value = flag.convert(texts)
        except ValueError as error:
            remedy = "for example " + ("2, 1_000_000 or 1e6" if flag.kind is int else "0.1 or 1e-4")
            self.wrong(flag, name, texts, str(error), remedy)
            return
        if flag.spec.path is not None:  # before anything opens it
            for text in texts:
                if (broken := path_rule(flag.spec.path, text)) is not None:
                    self.wrong(flag, name, [text], *broken)
                    return
        choices = flag.spec.choices
        illegal = [v for v in (value if flag.takes_several else (value,)) if choices is not None and v not in choices]
        if choices is None or not illegal:
            self.set(flag, name, value)
        elif feature := _feature(flag, illegal[:1]):
            rule = f"asks for {feature}, which is not built"
            self.wrong(flag, name, texts, rule, f"use {' or '.join(choices)}")
        elif (home := home_of(f"{flag.name}={illegal[0]}")) is not None:
            rule = f"is a value of the extension {home}, which is not installed"
            self.wrong(flag, name, texts, rule, f"{_restore(home)}; without it: {', '.join(choices)}")
        else:
            import difflib

            close = difflib.get_close_matches(illegal[0].lower(), [c.lower() for c in choices], n=1, cutoff=0.6)
            nearest = next((c for c in choices if close and c.lower() == close[0]), None)
            remedy = f"nearest: {nearest}" if nearest else "pick one of them"
            rule = f"must be one of {', '.join(choices)}" if choices else "must name a part, and none is registered"
            self.wrong(flag, name, texts, rule, remedy if choices else "give the --extension that registers it")

    def set(self, flag: Flag, name: str, value: Any) -> None:
        """The last of several wins, as launch scripts append overrides; a note says so if they differ. The values of a
        flag that may be repeated add up."""
        if flag.spec.repeats:
            value = (*(self.values[flag.field] if flag.field in self.given else ()), *value)
        elif flag.field in self.given and self.values.get(flag.field) != value:
            first = self.given[flag.field]
            both = f"{name} is given twice" if first == name else f"{first} and {name} are both given"
            self.notes.append(f"{both}, with different values: the last one, {name}{_shown(value)}, counts")
        self.values[flag.field] = value
        self.given[flag.field] = name

    def wrong(self, flag: Flag, name: str, texts: Sequence[str], rule: str, remedy: str) -> None:
        """Adds a problem with a field's value."""
        self.problems.append(Problem(name, tuple(texts) or None, rule, remedy))
        self.suspects.add(flag.name)

    # Files

    def read_file(self, path: str) -> None:
        """A flat YAML mapping: names of flags or fields, with dashes or underscores."""
        try:
            node = compose(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            self.problems.append(Problem("--config", path, f"cannot be read: {why}", "give a readable YAML file"))
            return
        if node is None:
            return
        if not node.tag.endswith(":map"):
            self.problems.append(Problem("--config", path, "must be a mapping", "write one `name: value` a line"))
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
        """Adds a problem for each value of a file that names code which no run of the user's own has recorded, apart
        from fields that are `replaced`."""
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

    def read_entry(self, path: str, key: str, value: Any) -> None:
        """One key of a mapping and its plain value; `path` says where it stands."""
        name = "--" + key.lstrip("-").replace("_", "-")
        where = f"{path}: {key}"
        flag, on = spelling_table().get(name, (None, True))
        if value not in (None, False):
            self.spelled.add(name)
        if name in options():
            self.problems.append(Problem(where, None, "is not configuration", "give it on the command line"))
        elif isinstance(value, dict):
            rule, remedy = "must be a value, or a list of values", "write names flat, without sections"
            self.problems.append(Problem(where, None, rule, remedy))
        elif flag is None:
            if value not in (None, False):  # a switch that is off asks for nothing
                before = len(self.problems)
                self.read(name, [] if value is True else texts_of(value))
                new = self.problems[before:]
                self.problems[before:] = [replace(p, flag=where) if p.flag == name else p for p in new]
        elif flag.field in self.given:
            rule = f"the file has it twice, as {self.given[flag.field]} too"
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
    """Field -> itself, and fields that set the same thing in other units."""
    groups: dict[str, list[str]] = {}
    for flag in all_flags():
        if (first := flag.spec.same_setting_as) is not None:
            groups.setdefault(first, [first]).append(flag.field)
    return groups


def overridden(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The values of two sources of flags. `later` wins, also over the same setting in another unit."""
    groups = settings_in_other_units().values()
    replaced = {field for group in groups if not later.keys().isdisjoint(group) for field in group}
    return {field: value for field, value in earlier.items() if field not in replaced} | later


def tokens_of(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, its values): all that stands between it and the next flag, or behind its `=`. A token before the first
    flag has no values and does not begin with two dashes. Blanks that a script quotes are nothing, unless they
    are a flag's first value."""
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
    """`name`, or if nobody knows it, the known one that has dashes for its underscores and `--no-` for `--disable-`."""
    dashes = "--" + name[2:].replace("_", "-")
    for spelling in (name, dashes, dashes.replace("--disable-", "--no-", 1)):
        if spelling in options() or spelling in spelling_table():
            return spelling
    found = {each for table in flag_tables() for each in table.spellings()}
    return next((each for each in (name, dashes, dashes.replace("--disable-", "--no-", 1)) if each in found), dashes)


def _is_switch(flag: Flag | None, name: str) -> bool:
    """Whether a flag takes no value, as far as this program knows it."""
    return flag.kind is bool if flag is not None else name not in options() or options()[name].values == (0,)


def _feature(flag: Flag, texts: Sequence[str]) -> str | None:
    """The feature of another program, which is not built, that values ask for."""
    return next(filter(None, (table.feature(flag.name, texts) for table in flag_tables())), None)


def _shown(value: Any) -> str:
    """A value as it stands behind its flag; nothing for a switch."""
    values = value if isinstance(value, tuple) else (value,)
    return "" if isinstance(value, bool) else "".join(f" {v}" for v in values)


def compose(path: str) -> Any:
    """The YAML of a file as nodes, its keys text. Raises OSError or ValueError where it cannot be read."""
    return compose_yaml(read_yaml_file(path))


def plain(node: Any) -> Any:
    """A YAML node as None, a bool, a list of texts, or text as it stands: fields know their own types. {} for a mapping
    and for a list that is no list of single values."""
    if node.id == "sequence" and all(item.id == "scalar" for item in node.value):
        return [item.value for item in node.value]
    if node.id != "scalar":
        return {}
    if node.tag.endswith(":bool"):
        return BOOLS.get(node.value.lower(), node.value)
    return None if node.tag.endswith(":null") and node.value.lower() in NULLS else node.value


BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULLS = ("", "~", "null")


def texts_of(value: Any) -> list[str]:
    """A plain YAML value as the texts of a flag."""
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def _restore(extension: str) -> str:
    return f"restore megatron/extensions/{extension} and its line in megatron/extensions/__init__.py, or remove it"
