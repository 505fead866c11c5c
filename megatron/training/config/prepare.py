"""Convert a command line to a valid configuration. All problems are reported together.

This module does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.core.tokenizers import build_tokenizer
from megatron.training.config.arguments import CommandLine, config_of, read_flags, with_model_flags
from megatron.training.config.commands import Prepared, refuse
from megatron.training.config.flags import EXTENSION_SECTIONS, StandInError, changed_flags, dashed, without_credentials
from megatron.training.config.input_files import missing_inputs, unusable_checkpoint
from megatron.training.config.output_files import why_unwritten
from megatron.training.config.rules.data import tokenizer
from megatron.training.config.rules.fields import REQUIRED, single_values
from megatron.training.config.rules.nearest import with_legal_values
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import with_past_batches, with_saved_flags
from megatron.training.config.validation import Problem, findings, resolve, validate, with_vocabulary
from megatron.training.extensions import problem_in_extension
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.url_credentials import redacted

TOKENIZER_FLAGS = {"--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size"}
"""Flags that select the tokenizer. If a tokenizer flag is wrong, the tokenizer is not read."""


def prepare(command: CommandLine, launch: Launch) -> RunConfig:
    """Return the configuration that `command` contains, resolved for the number of ranks in `launch`.

    If there are problems, the function prints all of them and raises SystemExit with code 2. If the command line
    selects a command, the function runs the command and raises SystemExit with its exit code. Only one rank prints
    messages.
    """
    try:
        return _prepared(command, launch)
    except Exception as error:
        if isinstance(error, OSError) and why_unwritten(error) is not None:
            raise
        if (problem := problem_in_extension(error)) is None:
            raise
        refuse([problem], launch, command.json_file)


def load_config(argv: Sequence[str], launch: Launch | None = None) -> tuple[RunConfig, list[Problem]]:
    """Return the configuration that a command line specifies, with defaults filled in, and every problem that prevents
    the run from starting.

    The tokenizer is built only once per process. This function prints nothing, and does not run the command that the
    command line selects. Raises ExtensionError for an --extension that cannot be loaded.
    """
    launch = launch or Launch()
    reader = read_flags(argv)
    config = with_model_flags(config_of(reader.values), reader)
    if reader.problems:
        return config, reader.problems
    try:
        loaded = _load(CommandLine(config, given=frozenset(reader.spelled)), launch, lambda line: None)
    except _LoadError as error:
        return config, error.problems
    return loaded.config, loaded.problems


class _LoadError(ValueError):
    """Raised if the checkpoint or model in --load cannot be read."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True)
class _Loaded:
    """Configuration with all defaults filled in, together with the problems found in it."""

    config: RunConfig
    problems: list[Problem]
    inputs: list[Problem]
    """Problems with input files. These problems prevent a run from starting, but a command may ignore them."""


def _load(line: CommandLine, launch: Launch, tell: Callable[[str], None]) -> _Loaded:
    """Resolve and validate the configuration of a command line. `tell` prints notes about the configuration, and
    notices about flags that have no effect. Raises _LoadError."""
    world_size = line.world_size or launch.world_size
    try:
        config, notes = with_saved_flags(line.config, line.given)
        not_given = line.of_model | changed_flags(line.config, config)
        config = with_past_batches(config)
    except (ValueError, OSError) as error:
        raise _LoadError(Problem.of_errors("--load", line.config.checkpoint.load, error)) from error
    problems, inputs = list[Problem](), list[Problem]()
    try:
        for section in EXTENSION_SECTIONS.values():
            config = section.with_files(config)
        config = without_credentials(config)
    except (ValueError, OSError) as error:
        config = error.config if isinstance(error, StandInError) else config
        (problems if line.command is None else inputs).extend(Problem.of_errors("--data-path", None, error))
    for note in (*line.notes, *notes):
        tell(redacted(note))
    resolved = resolve(config, world_size)
    vocab_size, unread = _vocabulary(config, resolved, line, world_size)
    resolved = with_vocabulary(resolved, vocab_size)
    (inputs if vocab_size is not None else problems).extend(unread)
    found = [*findings(config, world_size, resolved), *_smaller_vocabulary(config, vocab_size)]
    for notice in (each for each in found if each.harmless and each.flag not in not_given):
        tell(str(notice))
    problems += [each for each in found if not each.harmless]
    problems = with_legal_values(problems, config, partial(validate, world_size=world_size))
    problems = _about_load(config, problems, together=launch.several_hosts or line.command is not None)
    return _Loaded(resolved, problems, inputs)


def _prepared(line: CommandLine, launch: Launch) -> RunConfig:
    """Resolve and validate the configuration of a training run. Exceptions that an extension's code raises are not
    caught."""

    def tell(said: str) -> None:
        if launch.rank == 0:
            print(said, file=sys.stderr)

    try:
        loaded = _load(line, launch, tell)
    except _LoadError as error:
        refuse(error.problems, launch, line.json_file)
    config, problems = loaded.config, loaded.problems
    if line.command is not None:
        world_size = line.world_size or launch.world_size
        run = Prepared(config, world_size, problems, loaded.inputs, line.given, line.json_file, launch)
        raise SystemExit(line.command.run(run))
    problems += too_short_a_job(config, os.environ)
    if problems:
        if launch.rank == 0:  # a run without problems notices missing files later
            problems += missing_inputs(config, problems)
        refuse(problems, launch, None)
    return config


def _vocabulary(
    config: RunConfig, resolved: RunConfig, line: CommandLine, world_size: int
) -> tuple[int | None, list[Problem]]:
    """Return the vocabulary size and the problems found while reading the tokenizer.

    The size is None if no flag specifies it, or if tokenizer flags are wrong. If the tokenizer cannot be read, but the
    command line selects a command such as a memory plan, the function returns the vocabulary size that the flags or the
    checkpoint specify.
    """
    wrong = (*single_values(config), *tokenizer(resolved, world_size))
    if TOKENIZER_FLAGS & {problem.flag for problem in wrong}:
        return None, []
    try:
        return tokenizer_vocabulary(resolved), []
    except (ValueError, OSError) as error:
        unread = Problem.of_errors("--tokenizer-type", config.tokenizer.tokenizer_type, error)
    if line.command is None:
        return None, unread
    if stated := config.model.vocab_size or config.model.default_vocab_size:
        return stated, unread
    remedy = "to plan without the tokenizer, add --vocab-size with the number of tokens in its vocabulary"
    return None, [replace(each, remedy=f"{each.remedy}; {remedy}") for each in unread]


def _smaller_vocabulary(config: RunConfig, tokens: int | None) -> list[Problem]:
    """Return a notice if --vocab-size has no effect, because it is smaller than `tokens`, the number of tokens in the
    tokenizer."""
    stated = config.model.vocab_size
    if stated is None or tokens is None or config.tokenizer.tokenizer_type == "NullTokenizer" or stated >= tokens:
        return []
    rule = f"has no effect, because it is smaller than the tokenizer's vocabulary of {tokens}"
    return [Problem("--vocab-size", stated, rule, "remove it", harmless=True)]


def _about_load(config: RunConfig, problems: list[Problem], together: bool) -> list[Problem]:
    """Add a problem if model flags are missing and cannot be read from --load. Return all problems.

    Pass `together=True` if the --load folder is checked later, either by a command or by all ranks of a run on several
    hosts together. With `together=True`, a missing --load folder is not a problem, because only some hosts may have the
    folder.
    """
    required = {dashed(field) for field in REQUIRED}
    others = [each for each in problems if each.value is not None or each.flag not in required]
    has_model = len(others) == len(problems)
    if has_model and together:
        return problems
    unusable = unusable_checkpoint(config, has_model)
    return [*unusable, *others] if unusable else problems


def too_short_a_job(config: RunConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem if the SLURM job's time limit is so short that training could not start, even after a
    requeue."""
    start, end = environ.get("SLURM_JOB_START_TIME"), environ.get("SLURM_JOB_END_TIME")
    margin = config.training.exit_margin_in_mins
    if not (start and end and start.isdigit() and end.isdigit()) or (minutes := (int(end) - int(start)) / 60) > margin:
        return []
    rule = f"must be below {minutes:g}, the time limit of the SLURM job in minutes"
    return [Problem("--exit-margin-in-mins", margin, rule, f"{minutes / 4:g}, or a longer --time for the job")]


def tokenizer_vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary size of the tokenizer that the flags select, or None if they select no tokenizer."""
    if config.tokenizer.tokenizer_type is None:
        return None
    return build_tokenizer(config.tokenizer, config.model.vocab_size).vocab_size
