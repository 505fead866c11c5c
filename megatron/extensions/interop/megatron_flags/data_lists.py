"""Translation of data lists to --data-path and related flags. The lists are read from files, or parsed from flag values
in Megatron-DeepSpeed's syntax.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron.core.config.json_text import parse_json
from megatron.extensions.interop.megatron_flags.flags import DataLists
from megatron.training.config.flags import dashed, with_named
from megatron.training.config.run_config import RunConfig


def with_data_lists(config: RunConfig) -> RunConfig:
    """Set --data-path, --train-data-path and related flags to the data lists, and return the new configuration.

    Raises a ValueError that contains the name of the flag if a list is invalid. Raises OSError if the file that
    contains the list cannot be opened.
    """
    lists, found = config.options(DataLists).given, dict[str, tuple[str, ...]]()
    for field, value in lists.items():
        try:
            found |= _read(field, value)
        except ValueError as error:
            shown = value if isinstance(value, str) else " ".join(value)
            raise ValueError(f"{dashed(field)} {shown}: {error}") from None
    for field in found:
        if getattr(config.data, field):
            raise ValueError(f"{dashed(field)}: cannot be combined with {', '.join(map(dashed, lists))}")
    return with_named(config.without("data_args_path"), found)


def _read(field: str, value: tuple[str, ...] | str) -> dict[str, tuple[str, ...]]:
    """Parse the value of a data list flag. Return a dict that maps fields such as `train_data_path` to their values.
    `value` is either a str, which is the path of a file that contains the list, or a tuple, which is the list
    itself."""
    if not isinstance(value, str):
        return {_data_path(field): weighted_ranges(" ".join(value))}
    if field == "data_args_path":
        return {"data_path": tuple(Path(value).read_text(encoding="utf-8").split())}
    if field == "per_split_data_args_path":
        lists = parse_json(Path(value).read_text(encoding="utf-8"))
        if not isinstance(lists, dict) or not set(lists) <= {"train", "valid", "test"}:
            raise ValueError('must be a JSON object with lists "train", "valid" and "test"')
        return {f"{split}_data_path": _words(split, words) for split, words in lists.items() if words}
    return {_data_path(field): weighted_ranges(Path(value).read_text(encoding="utf-8"))}


def _data_path(field: str) -> str:
    return f"{field.partition('_')[0]}_data_path"


def _words(split: str, words: object) -> tuple[str, ...]:
    if isinstance(words, str):
        return tuple(words.split())
    if not isinstance(words, list):
        raise ValueError(f'"{split}" must be a list of prefixes, or of weights and prefixes')
    return tuple(str(word) for word in words)


def weighted_ranges(text: str) -> tuple[str, ...]:
    """Parse `NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX` and return the equivalent words of --data-path.

    Raises ValueError if the text is invalid. Also raises ValueError if the text contains more than one NAME, because
    each NAME would define a separate data set.
    """
    sections = re.split(r"""(?:^|[\s"'])([\w.-]+):(?=\s)""", text.strip())
    if len(sections) < 3 or sections[0].strip(" \"'"):
        raise ValueError('must be "NAME: WEIGHT START:END PREFIX, ..."')
    names, bodies = sections[1::2], sections[2::2]
    if len(names) > 1:
        raise ValueError(f"defines the data sets {', '.join(names)}, but a split supports only one data set; give one")
    return _members(bodies[0])


def _members(body: str) -> tuple[str, ...]:
    words: Sequence[str] = ()
    for member in body.strip(" \"'\n").split(","):
        parts = member.split()
        if len(parts) != 3 or not re.fullmatch(r"[0-9.]+:[0-9.]+", parts[1]):
            raise ValueError(f"{member.strip()!r} must be WEIGHT START:END PREFIX, for example 0.5 0:0.95 corpus")
        words = [*words, parts[0], f"{parts[2]}@{parts[1]}"]
    return tuple(words)
