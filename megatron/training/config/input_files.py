"""Check before start-up that all input files of a run exist. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.config.data import DatasetConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, data_kind_of, is_foreign_model, kind_of, refusal
from megatron.training.config.flags import dashed
from megatron.training.config.output_files import unwritable
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata
from megatron.training.plan import plan_class


def missing_inputs(config: RunConfig, known: Sequence[Problem]) -> list[Problem]:
    """Return the problems with the files that a run reads or writes. Commands that only plan a run, without starting
    it, do not need these files.

    The function checks that the output folders can be written, that the data sets exist, and that the checkpoint to
    load exists. Values with a `known` problem are not reported again.
    """
    wrong = {(problem.flag, problem.value) for problem in known}
    return [problem for problem in _missing(config) if (problem.flag, problem.value) not in wrong]


def _missing(config: RunConfig) -> Iterator[Problem]:
    yield from unwritable(config)
    options, (plan, _) = config.checkpoint, plan_class(config).planned(config)
    sets = [phase.config.data for phase in plan.phases] if plan is not None else []
    yield from dict.fromkeys(problem for data in sets for problem in missing_data(data))
    unusable = unusable_checkpoint(config)
    yield from unusable
    for field in () if unusable else ("finetune", "exit_on_missing_checkpoint"):
        load = located(options.load) if options.load and getattr(options, field) else None
        if load is not None and saved_metadata(load) is None and not is_foreign_model(load):
            rule, remedy = (
                f"holds no checkpoint, and {dashed(field)} needs one",
                f"correct the path, or drop {dashed(field)}",
            )
            yield Problem("--load", options.load, rule, remedy)


def unusable_checkpoint(config: RunConfig, has_model: bool = True) -> list[Problem]:
    """Return a problem if --load does not exist or is a file. Return no problem if the run may start from scratch
    instead.

    `has_model` is False if neither the flags nor the checkpoint describe the model. If `has_model` is False, a --load
    folder that contains no model is a problem too.
    """
    options = config.checkpoint
    load, kind = str(options.load), kind_of(options.load or "")
    if options.may_be_missing or PATH_KINDS.facts(kind).loaded_as or (has_model and os.path.isdir(load)):
        return []
    if kind != "missing":
        return [Problem.of_message("--load", load, f"--load {load}: {refusal(load).removeprefix(f'{load} ')}")]
    remedy = "correct the path"
    # --finetune and --exit-on-missing-checkpoint need a checkpoint.
    if not (options.finetune or options.exit_on_missing_checkpoint):
        remedy += ", or add --allow-missing-checkpoint to start from scratch"
    if HUB_NAME.fullmatch(load) and not Path(load).parent.exists():
        remedy += f"; download a model from the Hugging Face hub first: hf download {load} --local-dir FOLDER"
    return [Problem("--load", load, "does not exist and is not the --save folder", remedy)]


def absent_checkpoint(config: RunConfig) -> Problem | None:
    """Return a problem if --load does not exist, unless the run needs the checkpoint to determine the model. Otherwise,
    return None.

    A command that plans the run reports the missing checkpoint, but does not fail because of it.
    """
    if config.checkpoint.exit_on_missing_checkpoint or kind_of(config.checkpoint.load or "") != "missing":
        return None
    return next(iter(unusable_checkpoint(config)), None)


HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*[A-Za-z0-9]")
"""Pattern of a Hugging Face hub name such as Qwen/Qwen3-0.6B."""


def missing_data(data: DatasetConfig) -> Iterator[Problem]:
    """Yield a problem for each data set whose files cannot be opened."""
    from megatron.core.datasets.build import parse_blend, split_share
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"):
        flag, words = dashed(field), getattr(data, field) or ()
        words = [word.partition("=")[2] for word in words] if field == "valid" else words
        try:
            paths = [split_share(prefix)[0] for prefix in parse_blend(flag, words).prefixes] if words else []
        except ValueError:  # a rule reports this error
            continue
        for path in paths if data.dataset == "gpt" else ():
            try:
                kind = data_kind_of(path)
                IndexedDataset(path) if kind is None else kind.describe(flag, path)
            except ValueError as error:
                yield Problem.of_message(flag, path, str(error))
            except OSError as error:
                yield Problem(flag, path, str(error), "correct the path")
