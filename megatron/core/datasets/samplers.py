"""Assignment of samples to data-parallel ranks, and an iterator that prefetches samples.

Samples are numbered in the order in which the run consumes them. A step that starts at sample g uses the samples [g, g
+ global batch). Micro-batch m of data-parallel rank r uses micro_batch_size samples from g + (m * dp_size + r) *
micro_batch_size, unless a `Dealer` assigns the samples of the step differently. The samples of a step therefore depend
neither on the layout nor on the number of workers. A run can resume at any sample, and the global batch size may change
from step to step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.datasets.dataset import Dataset, Dealer
from megatron.core.datasets.sample_format import Sample
from megatron.core.datasets.sample_order import sources_of

MicroBatch = dict[str, Tensor | None]

# Number of micro-batches that each worker prefetches.
PREFETCH = 4


def in_order(dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Assign samples in order, as Megatron-LM does: micro-batch by micro-batch, replica by replica. This function is
    the default `Dealer`."""
    return np.arange(samples.start, samples.stop).reshape(-1, replicas, micro_batch_size)


def collate(samples: list[Sample], indices: Sequence[int]) -> MicroBatch:
    """Stack samples into one micro-batch of tensors [b, s], with `sample_index` [b].

    Entries that are None in the samples stay None.
    """
    batch: MicroBatch = {}
    for name in samples[0]:
        parts = [part for sample in samples if (part := sample[name]) is not None]
        batch[name] = torch.from_numpy(np.stack(parts)) if parts else None
    batch["sample_index"] = torch.tensor(indices)
    return batch


class DataIterator:
    """Iterator over the micro-batches of a data-parallel rank, step by step. With `num_workers` > 0, threads prepare
    the micro-batches ahead of the step. Threads are sufficient: reading and copying do not hold the interpreter lock,
    so even a single thread prepares samples faster than training consumes them. Worker processes have three
    disadvantages: they would be forked from a process with gloo and CUDA threads, would need shared memory, and could
    continue to run after the training process.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        name: str = "training",
        pin_memory: bool = False,
    ) -> None:
        """Create the iterator.

        Args:
            dataset: Dataset of the samples. Several threads may read the dataset at once.
            micro_batch_size: Samples per micro-batch.
            dp_rank: Data-parallel rank.
            dp_size: Number of data-parallel ranks.
            num_workers: Number of prefetch threads; 0 reads in the calling thread.
            name: Name of the data in error messages.
            pin_memory: Whether to copy micro-batches to pinned memory.
        """
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and num_workers >= 0
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.name = name
        self.pin_memory = pin_memory
        self.deal: Dealer = in_order
        self.with_sources = False
        """True if micro-batches contain the tensor `source_ids` [b], which contains the source number of each
        sample."""

        self.end = len(dataset)
        """End of the samples that may be used: samples with this or a higher number are neither used nor prefetched."""

        self.waited = 0.0
        """Total time in seconds that callers of `next_step` waited for samples."""

        self._pool = None
        if num_workers:
            # The current device of a new thread is device 0. Without setting the device, pinning memory would create a
            # CUDA context on device 0 for every rank.
            start = (torch.cuda.set_device, (torch.cuda.current_device(),)) if pin_memory else (None, ())
            self._pool = ThreadPoolExecutor(num_workers, f"{name}-data", *start)
        self._depth = num_workers * PREFETCH
        self._ready: deque[tuple[Sequence[int], Future[MicroBatch]]] = deque()
        self._coming: deque[Sequence[int]] = deque()  # micro-batches assigned to this rank that no worker prepares yet
        self._next = 0  # first sample that is not assigned yet

    @property
    def row(self) -> int:
        """Number of samples that all data-parallel ranks together process per micro-batch."""
        return self.micro_batch_size * self.dp_size

    def next_step(self, consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step that uses [consumed_samples, consumed_samples + global batch).

        If steps are consecutive, their samples are prefetched, even if the batch size changes. A step may also start at
        any other sample, without prefetching. The method raises ValueError if the dataset ends within the step.
        """
        assert global_batch_size % self.row == 0, f"{global_batch_size} samples in micro-batches of {self.row}"
        end = consumed_samples + global_batch_size
        if end > self.end:
            raise ValueError(
                f"the {self.name} data ended: a step takes samples {consumed_samples} to {end - 1} and the dataset has "
                f"{self.end}; request more samples (--train-iters or --train-samples for training, "
                "--eval-iters for evaluation), which repeats the data, or stop earlier"
            )
        wanted = self._deal(range(consumed_samples, end))
        if self._pool is not None:
            return self._take(range(consumed_samples, end), wanted)
        began = time.perf_counter()
        prepared = [self._prepare(indices) for indices in wanted]
        self.waited += time.perf_counter() - began
        return prepared

    def prepare_step(self, consumed_samples: int, global_batch_size: int) -> None:
        """Prepare the micro-batches of a step before the step begins, and wait until they are ready. If `num_workers`
        is 0, this method does nothing."""
        step = range(consumed_samples, consumed_samples + global_batch_size)
        if self._pool is None or step.stop > self.end:
            return
        self._drop()
        self._coming.extend(self._deal(step))
        self._next = step.stop
        self._schedule(len(self._coming), len(step))
        wait([future for _, future in self._ready])

    def restrict(self, end: int, micro_batch_size: int) -> None:
        """Change the end of the data and the micro-batch size. If either value changes, discard the prefetched
        micro-batches."""
        if (end, micro_batch_size) != (self.end, self.micro_batch_size):
            self._drop()
            self.end, self.micro_batch_size = end, micro_batch_size

    def close(self) -> None:
        """Stop the worker threads and discard prefetched micro-batches."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _deal(self, samples: range) -> list[Sequence[int]]:
        """Return the sample numbers of each micro-batch of this rank, for a step that uses `samples`."""
        dealt = self.deal(self.dataset, samples, self.dp_size, self.micro_batch_size)
        mine: list[Sequence[int]] = dealt[:, self.dp_rank].tolist()
        return mine

    def _take(self, step: range, wanted: list[Sequence[int]]) -> list[MicroBatch]:
        found = []
        for place, indices in enumerate(wanted):
            if not self._ready or self._ready[0][0] != indices:
                self._drop()
                self._coming.extend(wanted[place:])
                self._next = step.stop
            self._schedule(1 + self._depth, len(step))
            _, future = self._ready.popleft()
            if not future.done():
                began = time.perf_counter()
                wait([future])
                self.waited += time.perf_counter() - began
            found.append(future.result())
        # Prefetch at least the whole next step, assuming that it has the size of this step.
        self._schedule(max(self._depth, len(wanted)), len(step))
        return found

    def _schedule(self, depth: int, batch_size: int) -> None:
        """Schedule work until `depth` micro-batches are ready or in progress, or until the data ends.

        All further steps are assumed to have the global batch size `batch_size`.
        """
        assert self._pool is not None
        while len(self._ready) < depth:
            if not self._coming:
                if self._next + batch_size > self.end:
                    return
                self._coming.extend(self._deal(range(self._next, self._next + batch_size)))
                self._next += batch_size
            indices = self._coming.popleft()
            self._ready.append((indices, self._pool.submit(self._prepare, indices)))

    def _prepare(self, indices: Sequence[int]) -> MicroBatch:
        batch = collate([self.dataset[index] for index in indices], indices)
        if self.with_sources:
            numbers = [sources_of(self.dataset, range(index, index + 1)) for index in indices]
            batch["source_ids"] = torch.from_numpy(np.concatenate(numbers))
        if self.pin_memory:
            return {name: None if value is None else value.pin_memory() for name, value in batch.items()}
        return batch

    def _drop(self) -> None:
        for _, future in self._ready:
            future.cancel()
        self._ready.clear()
        self._coming.clear()
