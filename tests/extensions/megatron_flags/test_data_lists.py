"""Tests of weighted lists of data sets that are given in files or in Megatron-DeepSpeed's syntax."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.config.data import DatasetConfig
from megatron.extensions.interop.megatron_flags.data_lists import weighted_ranges, with_data_lists
from megatron.extensions.interop.megatron_flags.flags import DataLists
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate


def read(lists: DataLists) -> DatasetConfig:
    return with_data_lists(RunConfig().with_options(lists)).data


def test_words_of_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 a\n0.7 b\n")
    found = read(DataLists(data_args_path=str(tmp_path / "words")))
    assert found == DatasetConfig(data_path=("0.3", "a", "0.7", "b"))


def test_lists_of_a_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lists.json"
    file.write_text(json.dumps({"train": [0.5, "a", 0.5, "b"], "valid": "c", "test": None}))
    found = read(DataLists(per_split_data_args_path=str(file)))
    assert found == DatasetConfig(train_data_path=("0.5", "a", "0.5", "b"), valid_data_path=("c",))


@pytest.mark.parametrize(
    "text",
    ["train: 1 0:0.9 a, 2.5 0.1:1 dir/b", '"train: 1 0:0.9 a, 2.5 0.1:1 dir/b"\n', "tr_0: 1 0:0.9 a,2.5 0.1:1 dir/b"],
)
def test_weighted_ranges_are_parsed(text: str) -> None:
    assert weighted_ranges(text) == ("1", "a@0:0.9", "2.5", "dir/b@0.1:1")


def test_weighted_ranges_come_from_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "valid").write_text("valid: 1 0.9:1 a")
    of_file = str(tmp_path / "valid")
    lists = DataLists(train_weighted_split_paths=("t: 1 0:0.9 a",), valid_weighted_split_paths_path=of_file)
    assert read(lists) == DatasetConfig(train_data_path=("1", "a@0:0.9"), valid_data_path=("1", "a@0.9:1"))


UNREADABLE = [
    (DataLists(train_weighted_split_paths=("a b c",)), "--train-weighted-split-paths a b c: must be"),
    (DataLists(train_weighted_split_paths=("t: 1 a",)), "'1 a' must be WEIGHT START:END PREFIX"),
    (
        DataLists(valid_weighted_split_paths=("a: 1 0:1 x", "b: 1 0:1 y")),
        "defines the data sets a, b, but a split supports only one",
    ),
    (DataLists(per_split_data_args_path="LISTS"), "must be a JSON object"),
]


@pytest.mark.parametrize(("lists", "message"), UNREADABLE)
def test_unreadable_lists_are_refused(lists: DataLists, message: str, tmp_path: Path) -> None:
    if lists.per_split_data_args_path:
        (tmp_path / "lists").write_text("[1]")
        lists = DataLists(per_split_data_args_path=str(tmp_path / "lists"))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read(lists)


def test_lists_cannot_be_combined_with_other_data() -> None:
    """Conflicts with other data flags are reported even if the data lists cannot be read."""
    lists = ("--train-weighted-split-paths", "t: 1 0:1 a", "--valid-weighted-split-paths", "v: 1 0:1 a")
    with pytest.raises(ValueError, match="--train-data-path: cannot be combined with --train-weighted-split-paths, "):
        with_data_lists(parse_args([*lists, "--train-data-path", "b"]))

    def told(*argv: str) -> list[str]:
        found = validate(parse_args([*lists, "--train-iters", "1", *argv]), 1)
        return [str(each) for each in found if "-data" in each.flag]

    assert told() == []
    both = "--train-weighted-split-paths, --valid-weighted-split-paths"
    assert told("--mock-data") == [f"--mock-data: cannot be combined with {both}; keep one of them"]
