"""Files that a run reads: checks before start-up that they are there, and lists of data, also in Megatron-DeepSpeed's
words. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.config.data import DatasetConfig
from megatron.core.dist_checkpointing.path_kind import kind_of, reader_of
from megatron.core.parts import DATA_READERS, MODEL_LOADERS
from megatron.training.config.flags import dashed
from megatron.training.config.output_files import unwritable
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata
from megatron.training.plan import plan_class


def missing_inputs(config: RunConfig, known: Sequence[Problem]) -> list[Problem]:
    """A problem for each file that a run of a resolved configuration needs and a plan does not, but for values that are
    a problem already: output folders that cannot be written, data sets that are not there, a checkpoint to load."""
    wrong = {(problem.flag, problem.value) for problem in known}
    return [problem for problem in _missing(config) if (problem.flag, problem.value) not in wrong]


def _missing(config: RunConfig) -> Iterator[Problem]:
    yield from unwritable(config)
    options, (plan, _) = config.checkpoint, plan_class(config).planned(config)
    sets = [phase.config.data for phase in plan.phases] if plan is not None else []
    yield from dict.fromkeys(problem for data in sets for problem in missing_data(data))
    for field in ("finetune", "exit_on_missing_checkpoint"):
        load = Path(options.load) if options.load and getattr(options, field) else None
        if load is not None and saved_metadata(load) is None and kind_of(load) not in MODEL_LOADERS:
            rule, remedy = (
                f"holds no checkpoint, and {dashed(field)} needs one",
                f"correct the path, or drop {dashed(field)}",
            )
            yield Problem("--load", options.load, rule, remedy)


def missing_data(data: DatasetConfig) -> Iterator[Problem]:
    """A problem for each data set of files that cannot be opened."""
    from megatron.core.datasets.build import parse_blend, split_share
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"):
        flag, words = dashed(field), getattr(data, field) or ()
        words = [word.partition("=")[2] for word in words] if field == "valid" else words
        try:
            paths = [split_share(prefix)[0] for prefix in parse_blend(flag, words).prefixes] if words else []
        except ValueError:  # a rule reports it
            continue
        for path in paths if data.dataset == "gpt" else ():
            try:
                reader = reader_of(path)
                IndexedDataset(path) if reader is None else DATA_READERS[reader].describe(flag, path)
            except ValueError as error:
                yield Problem.of_message(flag, path, str(error))
            except OSError as error:
                yield Problem(flag, path, str(error), "correct the path")


def with_data_lists(data: DatasetConfig) -> DatasetConfig:
    """The configuration with what `data.listed` lists under --data-path, --train-data-path and their kin.

    Raises ValueError naming the flag if a list cannot be read.
    """
    found: dict[str, Any] = {}
    for field, value in data.listed.items():
        try:
            found |= _read(field, value)
        except (OSError, ValueError) as error:
            shown = value if isinstance(value, str) else " ".join(value)
            missing = isinstance(error, FileNotFoundError)
            why = "there is no such file; correct the path" if missing else error
            raise ValueError(f"{dashed(field)} {shown}: {why}") from None
    for field in found:
        if getattr(data, field):
            raise ValueError(f"{dashed(field)}: cannot be combined with {', '.join(map(dashed, data.listed))}")
    values: dict[str, Any] = found | dict.fromkeys(data.listed)
    return replace(data, **values)


def _read(field: str, value: Any) -> dict[str, tuple[str, ...]]:
    """Field of a data path -> its words."""
    if field == "data_args_path":
        return {"data_path": tuple(Path(value).read_text(encoding="utf-8").split())}
    if field == "per_split_data_args_path":
        lists = json.loads(Path(value).read_text(encoding="utf-8"))
        if not isinstance(lists, dict) or not set(lists) <= {"train", "valid", "test"}:
            raise ValueError('must be a JSON object with lists "train", "valid" and "test"')
        return {f"{split}_data_path": _words(split, words) for split, words in lists.items() if words}
    texts = [Path(value).read_text(encoding="utf-8")] if field.endswith("_path") else value
    return {f"{field.partition('_')[0]}_data_path": weighted_ranges(" ".join(texts))}


def _words(split: str, words: Any) -> tuple[str, ...]:
    if isinstance(words, str):
        return tuple(words.split())
    if not isinstance(words, list):
        raise ValueError(f'"{split}" must be a list of prefixes, or of weights and prefixes')
    return tuple(str(word) for word in words)


def weighted_ranges(text: str) -> tuple[str, ...]:
    """The words of a data path in `NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX`.

    Raises ValueError if it cannot be read, or has several names, each of which would be a set of its own.
    """
    sections = re.split(r"""(?:^|[\s"'])([\w.-]+):(?=\s)""", text.strip())
    if len(sections) < 3 or sections[0].strip(" \"'"):
        raise ValueError('must be "NAME: WEIGHT START:END PREFIX, ..."')
    names, bodies = sections[1::2], sections[2::2]
    if len(names) > 1:
        raise ValueError(f"has the sets {', '.join(names)}; several sets of one kind are not built: give one")
    return _members(bodies[0])


def _members(body: str) -> tuple[str, ...]:
    words: Sequence[str] = ()
    for member in body.strip(" \"'\n").split(","):
        parts = member.split()
        if len(parts) != 3 or not re.fullmatch(r"[0-9.]+:[0-9.]+", parts[1]):
            raise ValueError(f"{member.strip()!r} must be WEIGHT START:END PREFIX, for example 0.5 0:0.95 corpus")
        words = [*words, parts[0], f"{parts[2]}@{parts[1]}"]
    return tuple(words)
