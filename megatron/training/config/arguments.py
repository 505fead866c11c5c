"""Conversion of a command line and YAML files to a `RunConfig`, and back. This module does not import torch.

No flag is ignored silently. All problems are reported together: unknown flags with a suggestion, values of the wrong
type, flags for features that are not implemented, and the problems that `validate` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Protocol, runtime_checkable

from megatron import __version__
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of
from megatron.training.config.commands import Command, asked_command, json_file_of, options, refuse, switches
from megatron.training.config.flags import (
    Flag,
    all_flags,
    changed_flags,
    config_of_sections,
    flat_values,
    is_registered,
    value_of,
)
from megatron.training.config.help import help_text
from megatron.training.config.problem import Problem, print_problems, text_rule
from megatron.training.config.reading import (
    FlagReader,
    foreign_examples,
    overridden,
    tokens_of,
)
from megatron.training.config.rules.fields import REQUIRED
from megatron.training.config.rules.nearest import with_legal_values
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import names_data, resolve, validate
from megatron.training.config.yaml_text import compose, plain, texts_of
from megatron.training.extensions import ExtensionError, load_extensions, loaded_extensions, may_load
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.starts import spare_ranks

__all__ = ["CommandLine", "command_line", "parse_args", "print_problems", "save_config", "with_flags"]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
"""Folder of example extensions in a clone of the repository."""


@dataclass(frozen=True)
class CommandLine:
    """Result of parsing a command line: the configuration, notes, and the command to run."""

    config: RunConfig
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    """Lines to print about flags that have no effect, and about flags that were replaced with other flags."""

    command: Command | None = None
    """Command that the program runs instead of training. If None, the program trains."""

    json_file: str | None = None
    """File to which the command writes JSON; "" for standard output, None if it writes no JSON."""

    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Spellings of all given flags, including flags that have no configuration field. The set contains each flag twice:
    alone, and with its first value, such as "--tp 2"."""

    of_model: frozenset[str] = field(default=frozenset(), compare=False)
    """Flags whose values come from a model in --load that another program wrote, and not from the command line."""


def command_line(argv: Sequence[str], launch: Launch | None = None) -> CommandLine:
    """Parse `argv`. For `--help`, this function prints the help text and raises SystemExit(0).

    If flags are not valid, one rank prints every problem with the flags and every problem found by validation, and this
    function raises SystemExit(2).
    """
    launch = launch or Launch.from_environment()
    if "--version" in argv:
        from importlib.metadata import version  # imported here because it imports the slow package email

        if launch.rank == 0:
            print(f"pretrain_gpt {__version__}, torch {version('torch')}")
        raise SystemExit(0)
    try:
        reader = read_flags(argv)
    except ExtensionError as error:
        json_file = json_file_of({name: "".join(texts[:1]).strip() for name, texts in tokens_of(argv)})
        problem = Problem("--extension", None, error.rule, error.remedy)
        refuse([problem], launch, json_file)
    if (about := _help_words(argv)) is not None:
        if launch.rank == 0:
            sys.stdout.write(help_text(_options(), REQUIRED, about))
        raise SystemExit(0)
    written = config_of(reader.values)
    config = with_model_flags(written, reader)
    world_size = reader.world_size
    command = asked_command(reader, world_size)
    if command is not None and not command.reads_data and not names_data(config):
        config = replace(config, data=replace(config.data, mock_data=True))
        reader.notes.append("no data are given: the plan uses synthetic data, as with --mock-data")
    json_file = json_file_of({name: texts[-1] for name, texts in reader.options.items()})
    trained = max(1, launch.world_size - (spare_ranks(config) if command is None else 0))
    if world_size is None and trained < launch.world_size:
        world_size = trained
    if world_size is not None and command is None and world_size != trained:
        others = "".join(f", or add {' or '.join(names)}" for names in [switches()] if names)
        rule = f"the launcher started {launch.world_size} process{'es' if launch.world_size > 1 else ''}"
        remedy = f"start {world_size} processes with torchrun or srun{others}"
        reader.problems.append(Problem("--world-size", world_size, rule, remedy))
    if world_size is None and command is not None and launch.launcher == "none":
        parallel = config.parallel
        world_size = max(1, parallel.model_parallel_size * (parallel.data_parallel_size or 1))
        if (note := command.note(world_size)) is not None:
            reader.notes.append(note)
    if reader.problems:
        ranks = world_size or launch.world_size
        # A --config file that cannot be read may set the missing flags.
        unread = any(problem.flag == "--config" for problem in reader.problems)
        found = [] if unread else validate(resolve(config, ranks), ranks)
        found = with_legal_values(found, config, partial(validate, world_size=ranks))
        refuse(reader.problems + [p for p in found if p.flag not in reader.suspects], launch, json_file)
    of_model = changed_flags(written, config)
    spelled = frozenset(reader.spelled)
    return CommandLine(config, world_size, tuple(reader.notes), command, json_file, spelled, of_model)


def _options() -> list[tuple[str, str]]:
    """Return (spelling, help text) pairs of the command-line options that are not configuration fields."""
    return [
        *((f"{name} {option.usage}".rstrip(), option.help) for name, option in options().items()),
        (
            "--help, -h [WORD ...]",
            "Print this text, all flags (all), the group with this title, or the flags that mention these words; exit.",
        ),
        ("--version", "Print the version and exit."),
    ]


def _help_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words between --help and the next flag, or None if --help is not given."""
    place = next((number for number, token in enumerate(argv) if token in ("--help", "-h")), None)
    return None if place is None else list(takewhile(lambda token: not token.startswith("-"), argv[place + 1 :]))


def parse_args(argv: Sequence[str]) -> RunConfig:
    """Parse `argv` into a configuration, without validating it. Raises ValueError with a message that lists all
    problems, one per line."""
    reader = read_flags(argv)
    config = with_model_flags(config_of(reader.values), reader)
    reader.raise_problems()
    return config


@runtime_checkable
class StatesFlags(Protocol):
    """Protocol for entries of `PATH_KINDS` whose models determine flags. An entry is a function that takes a path, and
    returns True if the path is of the entry's kind. A run that loads a model from such a path takes some flags from the
    model."""

    def __call__(self, path: str, /) -> bool: ...

    def with_flags(self, config: RunConfig, reader: FlagReader) -> RunConfig:
        """Return the configuration with the flags that the model in --load determines.

        Add problems and notes to `reader`. Implementations must not import torch.
        """


@runtime_checkable
class ChangesModel(Protocol):
    """Base class of extension flags that modify the loaded model at the start of a run."""

    def changes_model(self) -> Collection[str]:
        """Return the names of the model fields that the flags change."""


def changed_by_start(config: RunConfig) -> set[str]:
    """Return the model fields that this run changes when it loads the model from --load."""
    given = (options for options in config.extension_options if isinstance(options, ChangesModel))
    return {name for options in given for name in options.changes_model()}


def with_model_flags(config: RunConfig, reader: FlagReader) -> RunConfig:
    """Return the configuration, with some flags set to the values that another program's model in --load requires.
    Besides the other program's model, the --load folder may contain checkpoints of a run that started from this
    model."""
    load = config.checkpoint.load
    try:
        kinds = [] if load is None or kind_of(load) == "checkpoint" else [PATH_KINDS[name] for name in PATH_KINDS]
    except OSError as error:
        rule, remedy = f"cannot be read: {error}", "correct it, or repair the disk or storage that contains it"
        reader.problems.append(Problem("--load", load, rule, remedy))
        return config
    models = (kind for kind in kinds if isinstance(kind, StatesFlags))
    found = next((kind for kind in models if kind(str(load))), None)
    return config if found is None else found.with_flags(config, reader)


def with_flags(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """Return `config` updated with the flags in `argv`, without validation. Raises ValueError with a message that lists
    all problems, one per line."""
    reader = read_flags(argv)
    reader.raise_problems()
    return config_of(flat_values(config) | reader.values)


def config_of(values: dict[str, object]) -> RunConfig:
    """Build the unresolved configuration from values keyed by field name."""
    # Required fields that are not given have the value 0 too, so remember which zeros were given.
    zeros = tuple((name, 0) for name in REQUIRED if values.get(name) == 0)
    return replace(config_of_sections({"": values}), given=zeros)


def read_flags(argv: Sequence[str], script: Path | None = None) -> FlagReader:
    """Read a command line. The extensions that the command line names are read first, and then the --config files in
    order. The flags are read last and override the files.

    `script` is the file from which the command line was read, or None if the user typed it. Raises ExtensionError.
    """
    tokens = list(tokens_of(argv))
    extensions = _load_extensions(tokens, script)
    unknown = [(name, texts) for name, texts in tokens if not is_registered(name, *texts[:1])]
    examples = foreign_examples(unknown) if unknown else {}
    extensions += load_extensions([str(EXAMPLES / file) for file in examples])
    reader = FlagReader()
    reader.notes += [f"{given} loads examples/{file} as an extension" for file, given in examples.items()]
    reader.read_all(tokens)
    files = FlagReader()
    for path in reader.options.get("--config", ()):
        files.read_file(path)
    for exchange in files.exchanges:
        exchange()
    files.refuse_unrecorded_code(reader.given)
    reader.values = overridden(files.values, reader.values) | ({"extension": extensions} if extensions else {})
    reader.problems = files.problems + reader.problems
    reader.notes = files.notes + reader.notes
    reader.suspects |= files.suspects
    reader.spelled |= files.spelled
    for exchange in reader.exchanges:
        exchange()
    return reader


def _load_extensions(tokens: Sequence[tuple[str, list[str]]], script: Path | None) -> tuple[str, ...]:
    """Import the extensions that the command line names. Also import those extensions named in configuration files that
    are permitted to load. Return the absolute paths of the extensions.

    An extension on the command line replaces an extension with the same file name in a configuration file, for example
    if the extension's file has moved. Raises ExtensionError.
    """
    written = [text for name, texts in tokens if name == "--extension" for text in texts if text_rule(text) is None]
    given = list(load_extensions([] if script else written))
    known = loaded_extensions()
    sources = [(script, f"script {script}", written)] if script else []
    for path in (text for name, texts in tokens if name == "--config" for text in texts):
        sources.append((Path(path), f"--config {path}", _extensions_in(path)))
    for source, shown, names in sources:
        others = [name for name in known if name not in names]
        allowed = may_load([name for name in names if name not in known], others, source, shown)
        given += [name for name in names if name in known] + list(load_extensions(allowed))
    return tuple(dict.fromkeys(given))


def _extensions_in(path: str) -> list[str]:
    """Return the extensions that the entry `extension` of a flag file lists. Return an empty list if the file cannot
    be read, because that error is reported later."""
    try:
        node = compose(path)
    except (OSError, ValueError):
        return []
    entries = node.value if node is not None and node.tag.endswith(":map") else ()
    found = [plain(value) for key, value in entries if key.value.lstrip("-") == "extension"]
    return [text for value in found if value for text in texts_of(value)]


def save_config(config: RunConfig, path: str | PurePath) -> None:
    """Write a configuration as YAML that `--config` reads back.

    Values that are derived from other values or from the world size are written as comments. Without derived values,
    the file can be used with another layout, and a flag that overrides a value also changes the values derived from it.
    The global batch size is always written as a value, so that it stays the same if a run continues with another
    layout.
    """
    derived = dict(config.given)
    derived.pop("global_batch_size", None)
    lines = ["# Resolved configuration. Start a run with --config FILE; flags override this file."]
    section = None
    for flag in all_flags():
        if flag.section != section:
            section = flag.section
            lines += ["", f"# {section}"]
        value = value_of(config, flag)
        if flag.field in derived:
            lines += [f"# derived: {line}" for line in _yaml_lines(flag, value)]
            value = derived[flag.field]
            if value == flag.default:
                continue
        lines += _yaml_lines(flag, value)
    text, path = "\n".join(lines) + "\n", located(path)
    if not isinstance(path, Path):
        storage_of(path).write(path, text.encode())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _yaml_lines(flag: Flag, value: object) -> list[str]:
    """Format a flag and its value as YAML lines. If the value is None, return no lines."""
    import yaml

    if value is None:
        return []
    if flag.kind is bool and not dict(flag.spellings())[flag.name]:
        value = not value
    return [yaml.safe_dump({flag.name[2:]: list(value) if isinstance(value, tuple) else value}, width=10**6).strip()]
