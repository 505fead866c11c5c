"""Lists of data in files and in Megatron-DeepSpeed's words, and shares of a dataset's documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets, split_share
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.config.input_files import weighted_ranges, with_data_lists


def test_words_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 a\n0.7 b\n")
    found = with_data_lists(DatasetConfig(data_args_path=str(tmp_path / "words")))
    assert found == DatasetConfig(data_path=("0.3", "a", "0.7", "b"))


def test_lists_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lists.json"
    file.write_text(json.dumps({"train": [0.5, "a", 0.5, "b"], "valid": "c", "test": None}))
    found = with_data_lists(DatasetConfig(per_split_data_args_path=str(file)))
    assert found == DatasetConfig(train_data_path=("0.5", "a", "0.5", "b"), valid_data_path=("c",))


@pytest.mark.parametrize(
    "text",
    ["train: 1 0:0.9 a, 2.5 0.1:1 dir/b", '"train: 1 0:0.9 a, 2.5 0.1:1 dir/b"\n', "tr_0: 1 0:0.9 a,2.5 0.1:1 dir/b"],
)
def test_weighted_ranges(text: str) -> None:
    assert weighted_ranges(text) == ("1", "a@0:0.9", "2.5", "dir/b@0.1:1")


def test_weighted_ranges_of_flags_and_files(tmp_path: Path) -> None:
    (tmp_path / "valid").write_text("valid: 1 0.9:1 a")
    data = DatasetConfig(
        train_weighted_split_paths=("train: 1 0:0.9 a",), valid_weighted_split_paths_path=str(tmp_path / "valid")
    )
    assert with_data_lists(data) == DatasetConfig(train_data_path=("1", "a@0:0.9"), valid_data_path=("1", "a@0.9:1"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DatasetConfig(train_weighted_split_paths=("a b c",)), "--train-weighted-split-paths a b c: must be"),
        (DatasetConfig(train_weighted_split_paths=("t: 1 a",)), "'1 a' must be WEIGHT START:END PREFIX"),
        (DatasetConfig(valid_weighted_split_paths=("a: 1 0:1 x", "b: 1 0:1 y")), "has the sets a, b; several"),
        (DatasetConfig(per_split_data_args_path="LISTS"), "must be a JSON object"),
        (DatasetConfig(train_weighted_split_paths=("t: 1 0:1 a",), train_data_path=("b",)), "cannot be combined"),
    ],
)
def test_lists_that_cannot_be_read(data: DatasetConfig, message: str, tmp_path: Path) -> None:
    if data.per_split_data_args_path:
        (tmp_path / "lists").write_text("[1]")
        data = DatasetConfig(per_split_data_args_path=str(tmp_path / "lists"))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        with_data_lists(data)


def test_a_share_of_the_documents(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(10):
            builder.add_document([number] * 8)
    sizes = (None, None, None)
    data = DatasetConfig(train_data_path=(f"{prefix}@0:0.6",), valid_data_path=(f"{prefix}@0.6:1",))
    found = build_datasets(data, seq_length=4, seed=1, sizes=sizes)
    assert found.train is not None and found.valid is not None
    tokens = [{int(t) for n in range(len(each)) for t in each[n]["tokens"]} for each in (found.train, found.valid)]
    assert tokens[0] <= set(range(6)) and tokens[1] <= set(range(6, 10)) and all(tokens)
    assert split_share("a.b") == ("a.b", None)
    with pytest.raises(ValueError, match="0 <= START < END <= 1"):
        split_share("a@0.5:0.5")
    with pytest.raises(ValueError, match="cannot be divided by --split"):
        build_datasets(DatasetConfig(data_path=(f"{prefix}@0:0.5",)), seq_length=4, seed=1, sizes=sizes)
