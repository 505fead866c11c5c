"""A run that becomes longer takes each token of an epoch as an input once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat, TextDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.source_order import SourceOrder
from tests.corpus import write_documents


def source(folder: Path, lengths: list[int]) -> IndexedDataset:
    """Documents of so many tokens; every token has an id of its own."""
    ends = np.cumsum(lengths)
    documents = map(np.arange, ends - lengths, ends)
    return IndexedDataset(write_documents(folder / "x", documents, "<i4"))


def order_of(indexed: IndexedDataset, folder: Path) -> SourceOrder:
    return SourceOrder(indexed, range(len(indexed)), seed=3, split="train", cache=IndexCache(str(folder / "c"), ""))


def inputs(view: TextDataset, samples: int) -> list[int]:
    return [token for number in range(samples) for token in view.text(number)[:-1].tolist()]


def test_a_longer_plan_keeps_the_order_and_goes_on_behind_it(tmp_path: Path) -> None:
    indexed = source(tmp_path, [7, 30, 11, 2, 50])
    begun = order_of(indexed, tmp_path).view(SampleFormat(4), [30])
    megatron = GPTDataset(indexed, range(5), 30, SampleFormat(4), seed=3, cache=IndexCache(str(tmp_path / "c"), ""))
    assert isinstance(begun, GPTDataset) and begun.fingerprint == megatron.fingerprint
    alone = order_of(indexed, tmp_path).view(SampleFormat(4), [90])
    assert inputs(alone, 30) != inputs(begun, 30), "Megatron-LM's order depends on the number of samples"
    longer = order_of(indexed, tmp_path).view(SampleFormat(4), [30, 40, 90])
    assert inputs(longer, len(begun)) == inputs(begun, len(begun)) and len(longer) >= 90
    again = order_of(indexed, tmp_path).view(SampleFormat(4), [30, 90, 70])
    assert inputs(again, len(begun)) == inputs(begun, len(begun))
    # All but the end of each segment is taken as often: 100 tokens, 24 or 49 samples of 4.
    counts = Counter(inputs(longer, len(longer)))
    assert set(counts.values()) <= {len(inputs(longer, len(longer))) // 100 + n for n in (-1, 0, 1)}
