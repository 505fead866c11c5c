"""Shares of the documents of a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets, split_share
from tests.corpus import write_documents


def test_a_share_of_the_documents(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", [[number] * 8 for number in range(10)])
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
