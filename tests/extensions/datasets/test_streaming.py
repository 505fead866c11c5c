"""Test that a data stream can be indexed like a dataset. Samples may be requested in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.samplers import DataIterator
from megatron.extensions.data.datasets.generator_dataset import GeneratorDataset, stream_splits

FORMAT = SampleFormat(seq_length=3, vocab_size=1000)


class Numbers:
    """Dataset whose sample n consists of four tokens with the id n. For each iteration over the dataset, the number of
    the first sample is recorded."""

    def __init__(self, end: int = 10**9) -> None:
        self.end, self.begun = end, list[int]()

    def __call__(self, first: int) -> Iterator[list[int]]:
        self.begun.append(first)
        return ([n] * 4 for n in range(first, self.end))


def test_samples_are_read_in_order_and_skipped_ones_are_kept() -> None:
    stream = Numbers()
    data = GeneratorDataset(stream, 100, FORMAT, "numbers")
    assert [int(data.text(i)[0]) for i in (0, 2, 1, 5, 4, 3, 6)] == [0, 2, 1, 5, 4, 3, 6]
    assert stream.begun == [0]
    assert int(data.text(50)[0]) == 50 and int(data.text(2)[0]) == 2
    assert stream.begun == [0, 2]


@pytest.mark.parametrize("workers", [0, 3])
def test_a_run_resumes_at_any_sample_on_any_number_of_ranks(workers: int) -> None:
    def taken(first: int, ranks: int) -> list[int]:
        found = []
        for rank in range(ranks):
            data = GeneratorDataset(Numbers(), 64, FORMAT, "numbers")
            of_rank = DataIterator(data, micro_batch_size=2, dp_rank=rank, dp_size=ranks, num_workers=workers)
            with closing(of_rank) as iterator:
                for start in (first, first + 8):
                    for batch in iterator.next_step(start, 8):
                        tokens, index = batch["tokens"], batch["sample_index"]
                        assert tokens is not None and index is not None and tokens[:, 0].equal(index)
                        found += index.tolist()
        return sorted(found)

    assert taken(8, 1) == taken(8, 2) == taken(8, 4) == list(range(8, 24))


def test_streams_that_end_or_yield_invalid_samples_are_named() -> None:
    with pytest.raises(ValueError, match="the stream of data ended at sample 2 of 9"):
        GeneratorDataset(Numbers(end=2), 9, FORMAT, "short").text(2)
    with pytest.raises(ValueError, match="sample 0 of the stream has shape \\(2,\\), but must be --seq-length"):
        GeneratorDataset(lambda first: iter([[1, 2]]), 9, FORMAT, "narrow").text(0)
    with pytest.raises(ValueError, match="token id 1000, outside the vocabulary of 1000"):
        GeneratorDataset(lambda first: iter([np.full(4, 1000)]), 9, FORMAT, "large").text(0)
    with pytest.raises(
        ValueError, match="a stream of data has no epochs; set the length of the run with --train-iters"
    ):
        stream_splits(lambda split, first: iter(()), FORMAT, (None, 0, 0), "endless")


def test_splits_are_separate_streams() -> None:
    def stream(split: str, first: int) -> Iterator[list[int]]:
        return ([len(split)] * 4 for _ in range(100))

    data = stream_splits(stream, FORMAT, (5, 4, 0), "lengths")
    assert data.train is not None and data.valid is not None and data.test is None
    assert (len(data.train), len(data.valid)) == (5, 4)
    assert (data.train.text(0)[0], data.valid.text(0)[0]) == (len("train"), len("valid"))
    assert data.train.fingerprint != data.valid.fingerprint
