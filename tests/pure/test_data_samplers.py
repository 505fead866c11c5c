"""Test that the samples of a step do not depend on the layout, the number of workers or the iteration at which the run
resumed."""

import threading
import time
from concurrent.futures import wait
from contextlib import closing

import numpy as np
import pytest
import torch

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.samplers import DataIterator
from tests.limits import wait_for


class Numbers:
    """Dataset whose sample i contains the number i. The dataset counts the reads in each process."""

    def __init__(self, size):
        self.size = size
        self.read = []
        self.threads = set()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        return {"tokens": np.array([index]), "position_ids": None}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_grow_and_steps_jump(workers):
    """The test increases the batch size, jumps to other positions, and repeats a step. At each of these changes,
    samples that are no longer needed have already been prefetched."""
    steps = [(0, 6), (6, 6), (12, 18), (30, 12), (60, 6), (66, 6), (66, 6), (10, 6)]
    with closing(DataIterator(Numbers(100), micro_batch_size=2, dp_rank=1, dp_size=3, num_workers=workers)) as iterator:
        for consumed, batch in steps:
            found = iterator.next_step(consumed, batch)
            rows = [[row, row + 1] for row in range(consumed + 2, consumed + batch, 6)]
            assert [part["tokens"].flatten().tolist() for part in found] == rows
            assert [part["sample_index"].tolist() for part in found] == rows


def test_workers_read_only_from_the_resumed_step_on():
    dataset, consumed = Numbers(10**9), 10**8
    with closing(DataIterator(dataset, micro_batch_size=1, num_workers=2, name="training")) as iterator:
        iterator.next_step(consumed, 1)
        wait_for(lambda: len(dataset.read) >= 9)
        assert sorted(dataset.read) == list(range(consumed, consumed + 9))
    assert all(name.startswith("training-data") for name in dataset.threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training-data")]


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_end_of_the_data_is_an_error(workers):
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


def test_only_waits_for_samples_count_as_waits():
    class Slow(Numbers):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    with closing(DataIterator(Slow(8), micro_batch_size=1, num_workers=1)) as iterator:
        iterator.next_step(0, 2)
        waited = iterator.waited
        assert waited > 0.05
        wait([future for _, future in iterator._ready])
        iterator.next_step(2, 2)
        assert iterator.waited == waited, "the samples were ready"
        iterator.prepare_step(6, 2)
        assert [part["tokens"].item() for part in iterator.next_step(6, 2)] == [6, 7] and iterator.waited == waited
    unready = DataIterator(Slow(8), micro_batch_size=1)
    unready.next_step(0, 2)
    assert unready.waited > 0.09
