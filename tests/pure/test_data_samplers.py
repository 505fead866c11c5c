"""Which samples a rank takes: the same whatever the layout, the workers and where the run resumed."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.samplers import DataIterator, microbatch_samples
from tests.limits import HANG


class Numbers:
    """Sample i holds i; counts who reads what."""

    fingerprint = "numbers"

    def __init__(self, size, delay=0.0):
        self.size = size
        self.delay = delay
        self.read = []
        self.threads = set()

    def __len__(self):
        return self.size

    def text(self, index):
        return np.array([index, index])

    def __getitem__(self, index):
        assert 0 <= index < self.size
        time.sleep(self.delay)
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        return {"tokens": np.array([index]), "position_ids": None}


def step_samples(dataset, consumed, batch, micro, dp, workers=0):
    """Samples of a step as [microbatch][rank] lists."""
    found = []
    for rank in range(dp):
        with closing(
            DataIterator(dataset, micro_batch_size=micro, dp_rank=rank, dp_size=dp, num_workers=workers)
        ) as iterator:
            found.append([batch["tokens"][:, 0].tolist() for batch in iterator.next_step(consumed, batch)])
    return [list(row) for row in zip(*found, strict=True)]


@given(micro=st.integers(1, 3), dp=st.integers(1, 4), count=st.integers(1, 4), consumed=st.integers(0, 50))
@settings(max_examples=40)
def test_a_step_takes_its_samples_in_order_whatever_the_layout(micro, dp, count, consumed):
    batch = micro * dp * count
    rows = step_samples(Numbers(200), consumed, batch, micro, dp)
    assert len(rows) == count
    assert [i for row in rows for part in row for i in part] == list(range(consumed, consumed + batch))


def test_rank_r_takes_the_rth_micro_batch_of_each_row():
    assert step_samples(Numbers(100), 8, 8, 2, 2) == [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]
    assert microbatch_samples(8, 1, 1, 2, 2) == range(14, 16)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_grow_and_steps_jump(workers):
    """Ramp-up, a resume elsewhere and a step repeated, with prefetch running past each of them."""
    steps = [(0, 4), (4, 4), (8, 12), (20, 8), (60, 4), (64, 4), (64, 4), (10, 4)]
    with closing(DataIterator(Numbers(100), micro_batch_size=2, dp_rank=1, dp_size=2, num_workers=workers)) as iterator:
        for consumed, batch in steps:
            found = [part["sample_index"].tolist() for part in iterator.next_step(consumed, batch)]
            rows = range(consumed + 2, consumed + batch, 4)
            assert found == [[row, row + 1] for row in rows]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_reads_nothing_of_what_was_consumed(workers):
    dataset = Numbers(10**9)
    with closing(DataIterator(dataset, micro_batch_size=2, num_workers=workers)) as iterator:
        batch = iterator.next_step(10**8, 2)[0]
    assert batch["sample_index"].tolist() == [10**8, 10**8 + 1]
    assert min(dataset.read) == 10**8 and len(dataset.read) < 40


def test_workers_read_ahead_of_the_step():
    dataset = Numbers(1000)
    with closing(DataIterator(dataset, micro_batch_size=1, num_workers=2, name="training")) as iterator:
        iterator.next_step(0, 1)
        deadline = time.monotonic() + HANG
        while len(dataset.read) < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(dataset.read) == list(range(9))
    assert all(name.startswith("training-data") for name in dataset.threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training-data")]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_the_data_is_an_error_and_not_before(workers):
    with closing(DataIterator(Numbers(10), micro_batch_size=2, num_workers=workers, name="validation")) as iterator:
        iterator.next_step(0, 8)
        assert len(iterator.next_step(8, 2)) == 1
        with pytest.raises(ValueError, match=r"validation data ended: a step takes samples 10 to 11 .* has 10"):
            iterator.next_step(10, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_sample_reaches_the_step(workers):
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise ValueError("sample 3 is broken")
            return super().__getitem__(index)

    with closing(DataIterator(Broken(10), micro_batch_size=1, num_workers=workers)) as iterator:
        iterator.next_step(0, 2)
        with pytest.raises(ValueError, match="sample 3 is broken"):
            iterator.next_step(2, 2)


def test_a_micro_batch_stacks_its_samples():
    datasets = build_datasets(
        DatasetConfig(mock_data=True, reset_attention_mask=True), seq_length=8, seed=1, sizes=(10, 0, 0), eod=0
    )
    with closing(DataIterator(datasets.train, micro_batch_size=3, num_workers=1)) as iterator:
        batch = iterator.next_step(3, 6)[1]
    assert batch["tokens"].shape == batch["labels"].shape == batch["document_ids"].shape == (3, 8)
    assert batch["tokens"].dtype == batch["sample_index"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["position_ids"] is None
    assert batch["sample_index"].tolist() == [6, 7, 8]
    torch.testing.assert_close(batch["tokens"][1], torch.from_numpy(datasets.train.text(7)[:-1]))
