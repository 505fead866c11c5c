"""A run that becomes longer, or changes its sequence length, takes each token of an epoch as an input once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.build import Demands, TrainingOrder, build_datasets
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat, TextDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.source_order import SourceOrder


def source(folder: Path, lengths: list[int]) -> IndexedDataset:
    """Documents of so many tokens; every token has an id of its own."""
    first = 0
    with IndexedDatasetBuilder(str(folder / "x"), np.dtype("<i4")) as builder:
        for length in lengths:
            builder.add_document(np.arange(first, first + length))
            first += length
    return IndexedDataset(str(folder / "x"))


def order_of(indexed: IndexedDataset, folder: Path) -> SourceOrder:
    return SourceOrder(indexed, range(len(indexed)), seed=3, split="train", cache=IndexCache(str(folder / "c"), ""))


def inputs(view: TextDataset, samples: int) -> list[int]:
    return [token for number in range(samples) for token in view.text(number)[:-1].tolist()]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 40), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_rest_of_a_stream_is_what_no_sample_had(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, samples: int, taken: int
) -> None:
    if sum(lengths) < 1:
        return
    folder = tmp_path_factory.mktemp("rest")
    indexed, cache = source(folder, lengths), IndexCache(str(folder / "c"), "")
    whole = GPTDataset(indexed, range(len(indexed)), samples, SampleFormat(seq_length), seed=1, cache=cache)
    rest = whole.rest(min(taken, len(whole)), cache)
    tokens = Counter(
        token
        for number, start, length in zip(rest.documents, rest.starts, rest.lengths, strict=True)
        for token in indexed.get(number, start, start + length).tolist()
    )
    assert all(length > 0 for length in rest.lengths)
    tokens.update(inputs(whole, min(taken, len(whole))))
    assert tokens == Counter(dict.fromkeys(range(sum(lengths)), whole.plan.epochs))


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


def test_a_source_goes_on_or_starts_anew_in_a_later_phase(tmp_path: Path) -> None:
    indexed, format = source(tmp_path, [7, 30, 11, 2, 50]), SampleFormat(4)
    whole = order_of(indexed, tmp_path).view(format, [24])
    order = order_of(indexed, tmp_path)
    found = inputs(order.view(format, [24]), 10)
    order.take(10)
    assert found + inputs(order.view(format, [14]), 14) == inputs(whole, 24)
    order.take(3)
    longer = order.view(SampleFormat(8), [4])
    seen = Counter(found + inputs(whole, 13)[40:] + inputs(longer, len(longer)))
    assert seen.most_common(1)[0][1] == 1, "no token twice"
    assert sum(seen.values()) >= 100 - 8, "but for the end of the stream every token"
    anew = order.view(SampleFormat(8), [12], anew=True)
    assert len(set(inputs(anew, 12))) == 96


def test_phases_of_a_blend_take_what_is_next_of_each_source(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 1000)):
        with IndexedDatasetBuilder(str(tmp_path / name), np.dtype("<i4")) as builder:
            for document in range(20):
                builder.add_document(np.arange(start + 20 * document, start + 20 * document + 20))
    order, seen = TrainingOrder(), []
    for words, seq_length, samples in (
        (("3", "a", "1", "b"), 4, 40),
        (("1", "a", "1", "b"), 4, 20),
        (("b",), 10, 12),
        (("0.5", "b", "0.5", "a"), 10, 10),
    ):
        paths = tuple(str(tmp_path / word) if word in "ab" else word for word in words)
        config = DatasetConfig(data_path=paths, split="1,0,0")
        order.present = []
        train = build_datasets(
            config, seq_length=seq_length, seed=1, sizes=(samples, 0, 0), demands=Demands(order)
        ).train
        assert isinstance(train, BlendedDataset) == (len(words) > 1) and train is not None
        seen += [token for number in range(samples) for token in train.text(number)[:-1].tolist()]
        order.take(train, samples)
    assert max(Counter(seen).values()) == 1, "800 tokens in all, of which 460 are taken"
