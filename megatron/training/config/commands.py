"""Commands that `pretrain_gpt.py` runs instead of training. Extensions add commands together with their options.
This module does not import torch.

The options of a command are not part of the configuration: they are given on the command line, never in a file, and
checkpoints do not store them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, Protocol

from megatron.core.registry import Registry
from megatron.training.config.flags import TooLargeError, parse_int
from megatron.training.config.problem import Problem, print_problems
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch


@dataclass(frozen=True)
class Option:
    """Definition of one command-line option."""

    help: str
    usage: str = ""
    """Placeholder that help texts show for the option's value, such as INT, or `[FILE]` if the value is optional."""

    command: bool = False
    """True if the option selects a command other than training."""

    json: bool = False
    """True if the option's value is a file to which a command writes its output as JSON, including problems. If the
    option has no value, the command writes the JSON to standard output."""

    @property
    def values(self) -> tuple[int, ...]:
        """Return the permitted numbers of values of the option: (0,), (1,) or (0, 1)."""
        return (0,) if not self.usage else (0, 1) if self.usage.startswith("[") else (1,)


@dataclass
class GivenOptions:
    """Options that a command line contains, and the problems found while reading them."""

    options: dict[str, list[str]] = field(default_factory=dict)
    """Values of each given option, with one entry for each time that the option is given. If an option is given without
    a value, its entry is ""."""

    problems: list[Problem] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        """Return the last value of an option, which overrides earlier values, or None if the option is not given."""
        values = self.options.get(name)
        return values[-1] if values else None

    def number(self, name: str, remedy: str) -> int | None:
        """Return the integer value of an option. If the value is not an integer above 0, report a problem and return
        None."""
        if (text := self.last(name)) is None:
            return None
        rule = "must be a whole number above 0"
        try:
            if (size := parse_int(text)) > 0:
                return size
        except TooLargeError as error:
            rule = str(error)
        except ValueError:
            pass
        self.problems.append(Problem(name, text, rule, remedy))
        del self.options[name]
        return None


@dataclass(frozen=True)
class Prepared:
    """Input of a command: a configuration with all defaults filled in, and the problems found in it."""

    config: RunConfig
    world_size: int
    problems: Sequence[Problem]
    """Problems that prevent a run from starting, except problems with input and output files."""

    inputs: Sequence[Problem]
    """Problems with lists of data sets that cannot be read. `missing_inputs` finds the problems with other inputs."""

    given: frozenset[str]
    """Spellings of all given flags. The set contains each flag twice: alone, and with its first value, such as "--tp
    2"."""

    json_file: str | None
    """File to which the command writes JSON; "" for standard output, None if it writes no JSON."""

    launch: Launch

    def refuse(self, problems: Sequence[Problem], json: bool = True) -> NoReturn:
        """Print the problems on one rank, then end the process with exit code 2. If `json` is True, the problems are
        also written as JSON to the file `json_file`."""
        refuse(problems, self.launch, self.json_file if json else None)


class Command:
    """Base class of commands that run instead of training."""

    reads_data: ClassVar[bool] = True
    """True if the command requires flags that select data; False if it can use synthetic data by default."""

    def note(self, world_size: int) -> str | None:
        """Return a line to print if neither a flag nor a launcher sets the number of ranks, which is then derived from
        the layout."""
        return f"planned for {world_size} ranks; --world-size sets a different number" if world_size > 1 else None

    def run(self, run: Prepared) -> int:
        """Run the command, and return the exit code. Every rank calls this method, but only rank 0 prints."""
        raise NotImplementedError


@dataclass(frozen=True)
class CommandFacts:
    """Properties of a command that are available without importing the command."""

    options: Mapping[str, Option]
    """Command-line options of the command, keyed by spelling."""


class ReadCommand(Protocol):
    """Function that reads the options of a command. The function is imported only if the command line contains an
    option of the command."""

    def __call__(self, given: GivenOptions, world_size: int | None) -> Command | None:
        """Return the command that the options select, or None if they select no command. If the options are not valid,
        add the problems to `given.problems`. `world_size` is the value of --world-size, or None if the flag is not
        given."""


COMMANDS = Registry("command", CommandFacts, protocol=ReadCommand)
"""Registry of commands, which `pretrain_gpt.py` runs instead of training:

    COMMANDS.register("count", "my.module:read", options={"--count": Option("Count the ranks.", command=True)})
"""


def options() -> dict[str, Option]:
    """Return all command-line options, keyed by spelling."""
    of_commands = {name: option for each in COMMANDS for name, option in COMMANDS.facts(each).options.items()}
    return {
        "--config": Option("YAML file of flags; may be given more than once, later files take precedence.", "FILE"),
        **of_commands,
        "--world-size": Option("Number of ranks to validate and plan for, if no launcher sets it.", "INT"),
    }


def switches() -> list[str]:
    """Return the options that select a command."""
    return [name for name, option in options().items() if option.command]


def asked_command(given: GivenOptions, world_size: int | None) -> Command | None:
    """Return the command that the given options select. If the options are not valid, add problems to
    `given.problems`."""
    found = [
        COMMANDS[each](given, world_size)
        for each in COMMANDS
        if not given.options.keys().isdisjoint(COMMANDS.facts(each).options)
    ]
    first, *others = [name for name in switches() if name in given.options] or [""]
    given.problems += [Problem.exclusive(other, None, first) for other in others]
    return next((command for command in found if command is not None), None)


def json_file_of(given: Mapping[str, str]) -> str | None:
    """Return the file to which a command writes its JSON output. `given` maps options to their values. Return None if
    no command is selected, or if no option requests JSON."""
    if given.keys().isdisjoint(switches()):
        return None
    return next((given[name] for name, option in options().items() if option.json and name in given), None)


def refuse(problems: Sequence[Problem], launch: Launch, json_file: str | None) -> NoReturn:
    """Print the problems on one rank, then end the process with exit code 2."""
    if launch.rank == 0:
        print_problems(problems, json_file)
    raise SystemExit(2)
