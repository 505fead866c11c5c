"""From a command line and YAML files to a `RunConfig`, and back. No torch.

Nothing is ignored in silence and every problem is reported at once: unknown flags with a suggestion, values of the
wrong type, flags that ask for what is not built, and with them what `validate` finds in the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatron import __version__
from megatron.extensions.hugging_face.pretrained import with_pretrained_flags
from megatron.extensions.megatron_flags.megatron_flags import foreign_flags
from megatron.extensions.planner.device_file import device_names, read_device
from megatron.training.config.flags import (
    Flag,
    all_flags,
    config_of_sections,
    field_table,
    flat_values,
    help_about,
    help_text,
    spelling_table,
    value_of,
)
from megatron.training.config.problem import Problem, print_problems
from megatron.training.config.reading import FlagReader, compose, overridden, plain, texts_of, tokens_of
from megatron.training.config.rules.single_values import REQUIRED
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate
from megatron.training.extensions import ExtensionError, load_extensions
from megatron.training.reliability.launch import Launch

__all__ = ["CommandLine", "command_line", "parse_args", "print_problems", "save_config", "with_flags"]

OPTION_HELP = (
    ("--config FILE", "YAML file of flags; may be given more than once, later files win."),
    ("--dry-run", "Validate, print the plan of the run, and exit."),
    (
        "--json [FILE]",
        "With --dry-run or --rehearse: write the plan or the report, and the resolved configuration, to FILE as well; "
        "without FILE to standard output, and nothing else.",
    ),
    (
        "--device NAME",
        "With --dry-run: predict the time of a step on a100, b200, h100 or h200, or on the device of FILE.yaml.",
    ),
    (
        "--gpus-per-node INT",
        "With --device: ranks of a node, which must divide the ranks; default: as the device file says, or the largest "
        "smaller number that divides them.",
    ),
    (
        "--suggest WORD",
        "With --dry-run and --device: judge the layout, and search for the fastest ones that fit; with all, until none "
        "can be faster.",
    ),
    ("--rehearse", "Run one step of ranks of a world that is not there, on fake tensors, and say what would fail."),
    ("--ranks WORD", "With --rehearse: all-distinct (the default), all, or ranks as 0,8,16-23."),
    (
        "--device-memory FLOAT",
        "GiB at which a rank of --rehearse runs out of memory, and that the plan of --dry-run and layouts of --suggest "
        "are to fit; default of the latter: as the device file says.",
    ),
    ("--world-size INT", "Ranks to validate and plan for, where no launcher says it."),
    ("--help, -h [WORD ...]", "Print this, or the flags that are about these words, and exit."),
    ("--version", "Print the version and exit."),
)


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
"""Extensions that a clone of the repository has."""


@dataclass(frozen=True)
class RehearsalOptions:
    """What --rehearse and the flags beside it say."""

    ranks: str = "all-distinct"
    device_memory: float | None = None
    """GiB."""


@dataclass(frozen=True)
class CommandLine:
    """What the command line says: the configuration, and what is not configuration."""

    config: RunConfig
    dry_run: bool = False
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    """Lines to show: flags without effect, and flags read as others."""

    plan_file: str | None = None
    """Where a dry run writes its plan, or a rehearsal its report, as JSON: "" is standard output."""

    device: str | None = None
    """The device that a dry run predicts the time of a step for."""

    gpus_per_node: int | None = None

    rehearsal: RehearsalOptions | None = None
    """None without --rehearse."""

    @property
    def trains(self) -> bool:
        """Whether ranks are started, which need the data and their world."""
        return not self.dry_run and self.rehearsal is None

    suggest: str | None = None
    """"" or "all" for a search."""

    """Whether a dry run searches for layouts."""

    device_memory: float | None = None
    """GiB of a device that the plan is to fit, and that layouts must."""

    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Every flag as it was given, alone and with its first value: also those that no field has."""


def command_line(argv: Sequence[str], launch: Launch | None = None) -> CommandLine:
    """Parses `argv`. `--help` prints and raises SystemExit(0). If it cannot be understood, raises SystemExit(2)
    after one rank has printed every problem, those of the validation included."""
    launch = launch or Launch.from_environment()
    if "--version" in argv:
        if launch.rank == 0:
            print(f"pretrain_gpt {__version__}, torch {version('torch')}")
        raise SystemExit(0)
    try:
        reader = read_flags(argv)
    except ExtensionError as error:
        if launch.rank == 0:
            given = dict(tokens_of(argv))
            asked = "--json" in given and not given.keys().isdisjoint(("--dry-run", "--rehearse"))
            problem = Problem("--extension", None, str(error), "correct the extension, or remove --extension")
            print_problems([problem], "".join(given["--json"][:1]) if asked else None)
        raise SystemExit(2) from None
    if (about := _help_words(argv)) is not None:
        if launch.rank == 0:
            nothing = f"no flag is about {' and '.join(about)}; --help prints all\n"
            sys.stdout.write((help_about(about, REQUIRED) or nothing) if about else help_text(OPTION_HELP, REQUIRED))
        raise SystemExit(0)
    config, world_size = with_pretrained_flags(config_of(reader.values), reader), reader.world_size
    dry_run, plan_file = "--dry-run" in reader.options, reader.options.get("--json", [None])[-1]
    device, gpus_per_node = _device_of(reader, dry_run)
    suggest, device_memory = reader.options.get("--suggest", [None])[-1], _device_memory(reader)
    if suggest not in (None, "", "all"):
        rule, remedy = "must be all or nothing", "--suggest, or --suggest all to search until none can be faster"
        reader.problems.append(Problem("--suggest", suggest, rule, remedy))
    if suggest is not None and (device is None or not dry_run):
        missing = [] if dry_run else [_to_plan(reader)]
        missing += [] if device else [f"add --device, one of {', '.join(device_names())}"]
        reader.problems.append(Problem("--suggest", None, "searches by predicted times", ", and ".join(missing)))
    if plan_file is not None and not dry_run and "--rehearse" not in reader.options:
        rule = "needs --dry-run, whose plan it writes, or --rehearse"
        reader.problems.append(Problem("--json", plan_file or None, rule, "add --dry-run"))
    elif plan_file and not _can_write(Path(plan_file)):
        rule, remedy = "cannot be written", "name a file in a folder that is there and may be written"
        reader.problems.append(Problem("--json", plan_file, rule, remedy))
    if gpus_per_node and world_size and world_size > gpus_per_node and world_size % gpus_per_node:
        rule = f"does not divide the {world_size} ranks: predictions are of nodes that hold as many ranks each"
        near = next(size for size in range(gpus_per_node, 0, -1) if world_size % size == 0)
        reader.problems.append(Problem("--gpus-per-node", gpus_per_node, rule, f"nearest: {near}"))
    rehearsal = _rehearsal(reader, dry_run, device_memory)
    alone = dry_run or rehearsal is not None
    if world_size is not None and not alone and world_size != launch.world_size:
        remedy = f"start {world_size} processes with torchrun or srun, or add --dry-run or --rehearse"
        rule = f"the launcher started {launch.world_size} process{'es' if launch.world_size > 1 else ''}"
        reader.problems.append(Problem("--world-size", world_size, rule, remedy))
    if world_size is None and alone and launch.launcher == "none":
        parallel = config.parallel
        world_size = max(1, parallel.model_parallel_size * (parallel.data_parallel_size or 1))
        if suggest is not None:
            remedy = "add --world-size, the ranks of the cluster"
            reader.notes.append(f"--suggest searches layouts of {world_size} ranks, those of the flags; {remedy}")
        elif world_size > 1:
            reader.notes.append(f"planned for {world_size} ranks; --world-size says otherwise")
    if reader.problems:
        ranks = world_size or launch.world_size
        unread = any(problem.flag == "--config" for problem in reader.problems)  # what is missing may stand in the file
        found = [] if unread else validate(resolve(config, ranks), ranks)
        problems = reader.problems + [p for p in found if p.flag not in reader.suspects]
        if launch.rank == 0:
            print_problems(problems, plan_file if alone else None)
        raise SystemExit(2)
    notes, said = tuple(reader.notes), frozenset(reader.spelled)
    return CommandLine(
        config, dry_run, world_size, notes, plan_file, device, gpus_per_node, rehearsal, suggest, device_memory, said
    )


def _can_write(path: Path) -> bool:
    """Whether a file can be written there, which is seen before a long search."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _device_of(reader: FlagReader, dry_run: bool) -> tuple[str | None, int | None]:
    """--device and --gpus-per-node; what is wrong with them becomes a problem."""
    device = reader.options.get("--device", [None])[-1]
    gpus_per_node = reader.number("--gpus-per-node", "say how many ranks share a node")
    if gpus_per_node is not None and device is None:
        rule, remedy = "needs --device, whose nodes it describes", f"add --device, {', '.join(device_names())}"
        reader.problems.append(Problem("--gpus-per-node", gpus_per_node, rule, remedy))
    if device is not None and not dry_run:
        rule = "needs --dry-run, which predicts"
        reader.problems.append(Problem("--device", device, rule, _to_plan(reader)))
    elif device is not None:
        try:
            read_device(device)
        except (ValueError, OSError) as error:
            remedy = f"use one of {', '.join(device_names())}, or a device file"
            reader.problems.append(Problem("--device", device, str(error), remedy))
    return device, gpus_per_node


def _to_plan(reader: FlagReader) -> str:
    """The remedy that makes a command a dry run."""
    return "replace --rehearse by --dry-run" if "--rehearse" in reader.options else "add --dry-run"


def _rehearsal(reader: FlagReader, dry_run: bool, device_memory: float | None) -> RehearsalOptions | None:
    """What is rehearsed; a value that is wrong becomes a problem."""
    options = RehearsalOptions(reader.options.get("--ranks", [RehearsalOptions.ranks])[-1], device_memory)
    if "--rehearse" not in reader.options:
        if "--ranks" in reader.options:
            value = reader.options["--ranks"][-1]
            reader.problems.append(Problem("--ranks", value, "is about a rehearsal", "add --rehearse"))
        return None
    if dry_run:
        reader.problems.append(Problem.exclusive("--rehearse", None, "--dry-run"))
    return options


def _device_memory(reader: FlagReader) -> float | None:
    """--device-memory in GiB; what is wrong with it becomes a problem."""
    name = "--device-memory"
    given = reader.options.get(name, [None])[-1]
    if given is None:
        return None
    if not {"--rehearse", "--dry-run"} & set(reader.options):
        rule, remedy = "is about a plan or a rehearsal", "add --dry-run or --rehearse"
        reader.problems.append(Problem(name, given, rule, remedy))
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        rule = "must be a number above 0"
        reader.problems.append(Problem(name, given, rule, "give the GiB of a device, such as 80"))
        return None
    return size


def _help_words(argv: Sequence[str]) -> list[str] | None:
    """What stands behind --help up to the next flag; None without --help."""
    place = next((number for number, token in enumerate(argv) if token in ("--help", "-h")), None)
    return None if place is None else list(takewhile(lambda token: not token.startswith("-"), argv[place + 1 :]))


def parse_args(argv: Sequence[str]) -> RunConfig:
    """The configuration that `argv` says, not validated. Raises ValueError with every problem, one a line."""
    reader = read_flags(argv)
    config = with_pretrained_flags(config_of(reader.values), reader)
    reader.raise_problems()
    return config


def with_flags(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """`config` with the flags `argv` changed, not validated. Raises ValueError with every problem, one a line."""
    return config_of(flat_values(config) | _legal_values(argv))


def _legal_values(argv: Sequence[str]) -> dict[str, Any]:
    reader = read_flags(argv)
    reader.raise_problems()
    return reader.values


def config_of(values: dict[str, Any]) -> RunConfig:
    """The configuration of values of fields by their names, not resolved."""
    found: dict[str, dict[str, Any]] = {}
    for field_name, value in values.items():
        found.setdefault(field_table()[field_name].section, {})[field_name] = value
    zeros = tuple((name, 0) for name in REQUIRED if values.get(name) == 0)  # which stand for what is missing
    return replace(config_of_sections(found), given=zeros)


def read_flags(argv: Sequence[str]) -> FlagReader:
    """Files first, in order, then flags, so that flags win. Before both, the extensions that either names.

    Raises ExtensionError."""
    tokens = list(tokens_of(argv))
    extensions = _load_extensions(tokens)
    examples = needed_examples(tokens)
    extensions += load_extensions([str(EXAMPLES / file) for file in examples])
    reader = FlagReader()
    reader.notes += [f"{given} loads examples/{file} as an extension" for file, given in examples.items()]
    reader.read_all(tokens)
    files = FlagReader()
    for path in reader.options.get("--config", ()):
        files.read_file(path)
    files.exchange()
    reader.values = overridden(files.values, reader.values) | ({"extension": extensions} if extensions else {})
    reader.problems = files.problems + reader.problems
    reader.notes = files.notes + reader.notes
    reader.suspects |= files.suspects
    reader.spelled |= files.spelled
    reader.exchange()
    return reader


def needed_examples(tokens: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """File of examples/ -> the flag that asks for what it registers, where nobody has registered that."""
    needed: dict[str, str] = {}
    for name, texts in tokens:
        if _registered(name, *texts[:1]):
            continue
        option, value = foreign_flags().stands_for(name, *texts[:1])
        file = foreign_flags().examples.get(f"{option} {value}")
        if file is not None and not _registered(option, value):
            needed[file] = " ".join([name, *texts[:1]])
    return needed


def _registered(name: str, value: str = "") -> bool:
    """Whether a flag is known, and takes the value."""
    flag, _ = spelling_table().get(name, (None, True))
    return flag is not None and (flag.spec.choices is None or value in flag.spec.choices)


def _load_extensions(tokens: Sequence[tuple[str, list[str]]]) -> tuple[str, ...]:
    """Imports the extensions that flags and files name, and returns them with whole paths. One that a flag names takes
    the place of one of the same file name in a file. Raises ExtensionError."""
    named = [text for name, texts in tokens if name == "--extension" for text in texts]
    given = {Path(text).name for text in named}
    for path in (text for name, texts in tokens if name == "--config" for text in texts):
        try:
            node = compose(path)
        except (OSError, ValueError):  # said when the rest of the file is read
            continue
        for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
            if key.value.lstrip("-") == "extension" and (found := plain(value)):
                named += [text for text in texts_of(found) if Path(text).name not in given]
    return load_extensions(named)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Writes a configuration as YAML that `--config` reads back.

    Values that follow from others, or from the world, stand in comments, so that the file also serves another layout
    and a flag that wins over it takes with it what depends on it. The global batch is kept: without it, a run that goes
    on at another layout would be another run.
    """
    derived = dict(config.given)
    derived.pop("global_batch_size", None)
    lines = ["# Resolved configuration. Start a run with it by --config; flags win over what stands here."]
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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _yaml_lines(flag: Flag, value: Any) -> list[str]:
    """A flag and its value as a line of YAML; nothing for None."""
    import yaml

    if value is None:
        return []
    if flag.kind is bool and not dict(flag.spellings())[flag.name]:
        value = not value
    return [yaml.safe_dump({flag.name[2:]: list(value) if isinstance(value, tuple) else value}, width=10**6).strip()]
