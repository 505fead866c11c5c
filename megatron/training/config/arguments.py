"""From a command line and YAML files to a `RunConfig`, and back. No torch.

Nothing is ignored in silence and every problem is reported at once: unknown flags with a suggestion, values of the
wrong type, flags that ask for what is not built, and with them what `validate` finds in the rest.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.training.config.flags import (
    Flag,
    all_flags,
    config_of_sections,
    field_table,
    help_text,
    parse_int,
    spelling_table,
    value_of,
)
from megatron.training.config.megatron_flags import CONSTANTS, foreign_flags
from megatron.training.config.problem import Problem, print_problems
from megatron.training.config.run_config import RunConfig
from megatron.training.config.tokenizer import vocab_size_flag
from megatron.training.config.validation import resolve, validate
from megatron.training.extensions import ExtensionError, load_extensions
from megatron.training.reliability.launch import Launch

__all__ = ["CommandLine", "command_line", "parse_args", "print_problems", "save_config", "to_flat_dict", "with_flags"]

OPTIONS = (
    ("--config FILE", "YAML file of flags; may be given more than once, later files win."),
    ("--dry-run", "Validate, print the plan of the run, and exit."),
    ("--world-size INT", "Ranks to validate and plan for, where no launcher says it."),
    ("--help, -h", "Print this and exit."),
)


@dataclass(frozen=True)
class CommandLine:
    """What the command line says: the configuration, and what is not configuration."""

    config: RunConfig
    dry_run: bool = False
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    """Lines to show: flags that have no meaning here."""


@dataclass
class _Reading:
    """Values found so far, and what is wrong with the rest."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    """Field -> where it stands in the source being read."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    """Flags that were probably meant, or given with a bad value: no use to say that they are missing."""

    dry_run: bool = False
    world_size: int | None = None
    files: list[str] = field(default_factory=list)


def command_line(argv: Sequence[str], launch: Launch | None = None) -> CommandLine:
    """Parses `argv`. `--help` prints and raises SystemExit(0). If it cannot be understood, raises SystemExit(2)
    after one rank has printed every problem, those of the validation included."""
    launch = launch or Launch.from_environment()
    try:
        reading = _read(argv)
    except ExtensionError as error:
        if launch.rank == 0:
            print_problems([Problem("--extension", None, str(error), "correct the extension, or remove --extension")])
        raise SystemExit(2) from None
    if any(token in ("--help", "-h") for token in argv):
        if launch.rank == 0:
            sys.stdout.write(help_text(OPTIONS))
        raise SystemExit(0)
    if reading.world_size is not None and not reading.dry_run and reading.world_size != launch.world_size:
        remedy = f"start {reading.world_size} processes with torchrun or srun, or add --dry-run"
        rule = f"the launcher started {launch.world_size} process{'es' if launch.world_size > 1 else ''}"
        reading.problems.append(Problem("--world-size", reading.world_size, rule, remedy))
    config = _config_of(reading.values)
    if reading.world_size is None and reading.dry_run and launch.launcher == "none":
        parallel = config.parallel
        reading.world_size = max(1, parallel.model_parallel_size * (parallel.data_parallel_size or 1))
        if reading.world_size > 1:
            reading.notes.append(f"planned for {reading.world_size} ranks; --world-size says otherwise")
    if reading.problems:
        world_size = reading.world_size or launch.world_size
        found = validate(resolve(config, world_size), world_size)
        problems = reading.problems + [p for p in found if p.flag not in reading.suspects]
        if launch.rank == 0:
            print_problems(problems)
        raise SystemExit(2)
    return CommandLine(config, reading.dry_run, reading.world_size, tuple(reading.notes))


def parse_args(argv: Sequence[str]) -> RunConfig:
    """The configuration that `argv` says, not validated. Raises ValueError with every problem, one a line."""
    return _config_of(_legal_values(argv))


def with_flags(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """`config` with the flags `argv` changed, not validated. Raises ValueError with every problem, one a line."""
    return _config_of(to_flat_dict(config) | _legal_values(argv))


def _legal_values(argv: Sequence[str]) -> dict[str, Any]:
    reading = _read(argv)
    if reading.problems:
        raise ValueError("\n".join(str(problem) for problem in reading.problems))
    return reading.values


def _config_of(values: dict[str, Any]) -> RunConfig:
    found: dict[str, dict[str, Any]] = {}
    for field_name, value in values.items():
        found.setdefault(field_table()[field_name].section, {})[field_name] = value
    return config_of_sections(found)


def _read(argv: Sequence[str]) -> _Reading:
    """Files first, in order, then flags, so that flags win. Before both, the extensions that either names."""
    flags = _Reading()
    extensions = _load_extensions(argv)
    for name, texts in _tokens(argv, flags):
        _read_flag(flags, name, texts)
    files = _Reading(problems=[], notes=[])
    for path in flags.files:
        _read_file(files, path)
    flags.values = files.values | flags.values | ({"extension": extensions} if extensions else {})
    flags.problems = files.problems + flags.problems
    flags.notes = files.notes + flags.notes
    flags.suspects |= files.suspects
    return flags


def _load_extensions(argv: Sequence[str]) -> tuple[str, ...]:
    """Imports the extensions that flags and files name, and returns them with whole paths. One that a flag names takes
    the place of one of the same file name in a file. Raises ExtensionError."""
    tokens = list(_tokens(argv, _Reading()))
    named = [text for name, texts in tokens if name == "--extension" for text in texts]
    given = {Path(text).name for text in named}
    for path in (text for name, texts in tokens if name == "--config" for text in texts):
        try:
            node = _compose(path)
        except (OSError, ValueError):  # said when the rest of the file is read
            continue
        for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
            if key.value.lstrip("-") == "extension" and (plain := _plain(value)):
                named += [text for text in _texts(plain) if Path(text).name not in given]
    return load_extensions(named)


def _tokens(argv: Sequence[str], reading: _Reading) -> Iterator[tuple[str, list[str]]]:
    """(flag, its values): all that stands between it and the next flag, or behind its `=`."""
    current: tuple[str, list[str]] | None = None
    for token in argv:
        if token.startswith("--"):
            if current:
                yield current
            name, equals, value = token.partition("=")
            current = (name, [value] if equals else [])
        elif current:
            current[1].append(token)
        else:
            reading.problems.append(Problem(token, None, "is not a flag", "flags begin with two dashes"))
    if current:
        yield current


def _read_flag(reading: _Reading, name: str, texts: list[str]) -> None:
    if name in ("--config", "--world-size", "--dry-run"):
        _read_option(reading, name, texts)
    elif name in spelling_table():
        flag, on = spelling_table()[name]
        if flag.kind is bool:
            if texts:
                _wrong(reading, flag, name, texts, "takes no value", "give the flag alone")
            _set(reading, flag, name, on)
        else:
            _set_value(reading, flag, name, texts)
    elif name in CONSTANTS:
        field_name, value = CONSTANTS[name]
        if texts:
            _wrong(reading, field_table()[field_name], name, texts, "takes no value", "give the flag alone")
        _set(reading, field_table()[field_name], name, value)
    else:
        _read_foreign(reading, name, texts)


def _read_option(reading: _Reading, name: str, texts: list[str]) -> None:
    wanted = 0 if name == "--dry-run" else 1
    if len(texts) != wanted:
        rule = "takes one value" if wanted else "takes no value"
        reading.problems.append(Problem(name, tuple(texts) or None, rule, f"given: {len(texts)}"))
    elif name == "--dry-run":
        reading.dry_run = True
    elif name == "--config":
        reading.files.append(texts[0])
    else:
        try:
            reading.world_size = parse_int(texts[0])
        except ValueError:
            reading.world_size = 0
        if reading.world_size < 1:
            reading.problems.append(Problem(name, texts[0], "must be a whole number above 0", "say how many ranks"))
            reading.world_size = None


def _read_foreign(reading: _Reading, name: str, texts: list[str]) -> None:
    """A flag that no field has: Megatron's, or nobody's."""
    value = tuple(texts) or None
    foreign = foreign_flags()
    if accepted := foreign.no_effect.get(name):
        if len(texts) != accepted.arity:
            rule = f"takes {'one value' if accepted.arity else 'no value'}"
            reading.problems.append(Problem(name, value, rule, "correct it, or remove the flag: it has no effect"))
        elif accepted.values and texts[0] not in accepted.values:
            legal = " or ".join(accepted.values)
            reading.problems.append(Problem(name, value, "asks for something that is not built", f"only {legal} is"))
        else:
            reading.notes.append(f"{' '.join([name, *texts])} has no effect: {accepted.reason}")
    elif instead := foreign.renamed.get(name):
        reading.problems.append(Problem(name, value, "is not a flag here", instead))
        reading.suspects |= {word.strip(",") for word in instead.split() if word.startswith("--")}
    elif feature := foreign.not_built.get(name) or next(
        (feature for prefix, feature in foreign.not_built_prefixes.items() if name.startswith(prefix)), None
    ):
        reading.problems.append(Problem(name, value, f"asks for {feature}, which is not built", "remove it"))
    else:
        _unknown(reading, name, value)


def _unknown(reading: _Reading, name: str, value: Any) -> None:
    known = [*spelling_table(), *CONSTANTS, "--config", "--dry-run", "--world-size"]
    plain = "--" + name.lstrip("-").replace("_", "-").lower()
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    remedy = f"did you mean {close[0]}?" if close else "--help lists all flags"
    reading.problems.append(Problem(name, value, "unknown flag", remedy))
    if close and close[0] in spelling_table():
        reading.suspects.add(spelling_table()[close[0]][0].name)


def _set_value(reading: _Reading, flag: Flag, name: str, texts: Sequence[str]) -> None:
    if not texts or (len(texts) > 1 and not flag.takes_several):
        rule = "takes one or more values" if flag.spec.many else "takes one value"
        _wrong(reading, flag, name, texts, rule, f"given: {len(texts)}")
        return
    try:
        value = flag.convert(texts)
    except ValueError as error:
        remedy = "for example " + ("2, 1_000_000 or 1e6" if flag.kind is int else "0.1 or 1e-4")
        _wrong(reading, flag, name, texts, str(error), remedy)
        return
    choices = flag.spec.choices
    wrong = [v for v in (value if flag.takes_several else (value,)) if choices and v not in choices]
    if choices and wrong:
        close = difflib.get_close_matches(wrong[0].lower(), [c.lower() for c in choices], n=1, cutoff=0.3)
        nearest = next((c for c in choices if close and c.lower() == close[0]), None)
        remedy = f"nearest: {nearest}" if nearest else "pick one of them"
        _wrong(reading, flag, name, texts, f"must be one of {', '.join(choices)}", remedy)
        return
    _set(reading, flag, name, value)


def _set(reading: _Reading, flag: Flag, name: str, value: Any) -> None:
    """The last of several wins, as launch scripts append overrides; where they differ, that is said. Flags that may be
    repeated add up."""
    if flag.spec.repeats:
        value = (*(reading.values[flag.field] if flag.field in reading.given else ()), *value)
    elif flag.field in reading.given and reading.values.get(flag.field) != value:
        first = reading.given[flag.field]
        both = f"{name} is given twice" if first == name else f"{first} and {name} are both given"
        reading.notes.append(f"{both}, with different values: the last one, {name}{_shown(value)}, counts")
    reading.values[flag.field] = value
    reading.given[flag.field] = name


def _shown(value: Any) -> str:
    """A value as it stands behind its flag; nothing for a switch."""
    values = value if isinstance(value, tuple) else (value,)
    return "" if isinstance(value, bool) else "".join(f" {v}" for v in values)


def _wrong(reading: _Reading, flag: Flag, name: str, texts: Sequence[str], rule: str, remedy: str) -> None:
    reading.problems.append(Problem(name, tuple(texts) or None, rule, remedy))
    reading.suspects.add(flag.name)


def _compose(path: str) -> Any:
    """The YAML of a file as nodes. Raises OSError or ValueError where it cannot be read."""
    import yaml

    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _read_file(reading: _Reading, path: str) -> None:
    """A flat YAML mapping: names of flags or fields, with dashes or underscores."""
    try:
        node = _compose(path)
    except (OSError, ValueError) as error:
        reading.problems.append(Problem("--config", path, " ".join(str(error).split()), "give a readable YAML file"))
        return
    if node is None:
        return
    if not node.tag.endswith(":map"):
        reading.problems.append(Problem("--config", path, "must be a mapping", "write one `name: value` a line"))
        return
    reading.given = {}
    for key, value in node.value:
        _read_entry(reading, path, str(key.value), _plain(value))


def _read_entry(reading: _Reading, path: str, key: str, value: Any) -> None:
    name = "--" + key.lstrip("-").replace("_", "-")
    where = f"{path}: {key}"
    flag, on = spelling_table().get(name, (None, True))
    if name in ("--config", "--dry-run", "--world-size"):
        reading.problems.append(Problem(where, None, "is not configuration", "give it on the command line"))
    elif isinstance(value, dict):
        reading.problems.append(Problem(where, None, "must be a value", "write names flat, without sections"))
    elif flag is None:
        if value not in (None, False):  # a switch that is off asks for nothing
            before = len(reading.problems)
            _read_flag(reading, name, [] if value is True else _texts(value))
            new = reading.problems[before:]
            reading.problems[before:] = [replace(p, flag=where) if p.flag == name else p for p in new]
    elif flag.field in reading.given:
        _wrong(
            reading,
            flag,
            where,
            _texts(value),
            f"the file says it twice, as {reading.given[flag.field]} too",
            "drop one",
        )
    elif value is not None:
        if flag.kind is bool:
            if isinstance(value, bool):
                _set(reading, flag, name, value == on)
            else:
                _wrong(reading, flag, where, _texts(value), "must be true or false", "correct the file")
        else:
            _set_value(reading, flag, where, _texts(value))
            reading.given[flag.field] = name


def _plain(node: Any) -> Any:
    """A YAML node as None, a bool, a list, a dict, or text as it stands: fields know their own types."""
    if isinstance(node.value, list):
        return {} if node.tag.endswith(":map") else [_plain(item) for item in node.value]
    if node.tag.endswith(":bool"):
        return node.value.lower() in ("true", "yes", "on")
    return None if node.tag.endswith(":null") else node.value


def _texts(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def to_flat_dict(config: RunConfig) -> dict[str, Any]:
    """Field -> value over all sections."""
    return {flag.field: value_of(config, flag) for flag in all_flags()}


def save_config(config: RunConfig, path: str | Path) -> None:
    """Writes a configuration as YAML that `--config` reads back.

    What follows from the world and the batch stands in comments, so that the file also serves another layout.
    """
    import yaml

    derived = {"data_parallel_size", "num_microbatches"}
    if config.training.train_samples is not None or config.training.train_tokens is not None:
        derived.add("train_iters")
    if config.training.train_tokens is not None:
        derived.add("train_samples")
    lines = ["# Resolved configuration. Start a run with it by --config; flags win over what stands here."]
    section = None
    for flag in all_flags():
        value = value_of(config, flag)
        if flag.field == "vocab_size":
            value = vocab_size_flag(config.tokenizer, config.model)
        if flag.section != section:
            section = flag.section
            lines += ["", f"# {section}"]
        if value is None:
            continue
        if flag.kind is bool and not dict(flag.spellings())[flag.name]:
            value = not value
        text = yaml.safe_dump({flag.name[2:]: list(value) if isinstance(value, tuple) else value}, width=10**6).strip()
        lines += [f"# derived: {text}" if flag.field in derived else text]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
