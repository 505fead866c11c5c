"""Callback that prefetches the samples of future steps from object storage, and reports how long steps wait for data.

The order of samples is known in advance. A thread determines which blocks of files this rank will read in its next
steps. A thread pool fetches these blocks into the host's cache (`block_cache`), so that steps read from the local disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import SampleOrder
from megatron.core.datasets.samplers import DataIterator
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.extensions.operate.object_storage.block_cache import CACHE, Stored
from megatron.extensions.operate.object_storage.flags import ObjectStorageFlags, is_url
from megatron.extensions.operate.object_storage.fsspec_storage import FsspecStorage
from megatron.extensions.operate.object_storage.limits import LIMITS
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter, RunView
from megatron.training.metrics.sinks import Record
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun

REQUESTS = 16
"""Maximum number of blocks that a rank fetches concurrently."""

MOST_STEPS = 256


class Block(NamedTuple):
    """Block of a file in object storage, identified by the file and the number of the block."""

    stored: Stored
    number: int


def blocks_of(dataset: Dataset, index: int) -> Iterator[Block]:
    """Yield the blocks in object storage that contain a sample. Yield nothing if the data set cannot list the
    documents of a sample."""
    while isinstance(dataset, SampleOrder):
        dataset, index = dataset.place(index)
    indexed = getattr(dataset, "indexed", None)
    if indexed is None or not is_url(indexed.prefix):
        return
    path = located(f"{indexed.prefix}.bin")
    storage = storage_of(path)
    assert isinstance(storage, FsspecStorage)
    stored, width = storage.unchanging(path), indexed.dtype.itemsize
    size = CACHE.block_bytes(stored)
    for document, start, count in dataset.documents_of(index):  # type: ignore[attr-defined]
        first = int(indexed.offsets[document]) + start * width
        for number in range(first // size, -(-(first + count * width) // size)):
            yield Block(stored, number)


class Window:
    """The next steps of a run, whose samples are prefetched. The samples of these steps have about `limit` bytes in
    total."""

    def __init__(self, train: DataIterator, limit: int) -> None:
        self.train, self.limit = train, limit
        self._pool = ThreadPoolExecutor(REQUESTS, "read-ahead")
        self._steps = deque[tuple[int, int]]()
        """One pair per prefetched step, in order. A pair consists of the end of the step's sample indices and the
        number of bytes that are fetched for the step."""

        self._seen: dict[Block, Future[bytes]] = {}
        self._next = -1

    def begin(self, step: range) -> list[Future[bytes]]:
        """Start fetching the samples of the first step, but not of later steps. Return the futures of these fetches."""
        if step.stop <= self.train.end:
            self._steps.append((step.stop, self._fetch(step)))
            self._next = step.stop
        return list(self._seen.values())

    def move(self, step: range) -> None:
        """Start fetching the samples of later steps, until about `limit` bytes are being fetched. `step` is the range
        of samples of the step that begins now. Later steps are assumed to have the same number of samples as this
        step."""
        while self._steps and self._steps[0][0] <= step.start:
            self._steps.popleft()
        if self._next < step.start or not self._steps:
            self._steps.clear()
            self._next = step.start
        size, ahead = len(step), sum(nbytes for _, nbytes in self._steps)
        while ahead < self.limit and len(self._steps) < MOST_STEPS and self._next + size <= self.train.end:
            nbytes = self._fetch(range(self._next, self._next + size))
            self._next += size
            self._steps.append((self._next, nbytes))
            ahead += nbytes

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, samples: range) -> int:
        train, nbytes = self.train, 0
        mine = train.deal(train.dataset, samples, train.dp_size, train.micro_batch_size)[:, train.dp_rank]
        for index in mine.reshape(-1).tolist():
            for block in blocks_of(train.dataset, index):
                if block not in self._seen:
                    self._seen[block] = self._pool.submit(_fetched, block)
                    nbytes += CACHE.block_bytes(block.stored)
        for block in [block for block, fetch in self._seen.items() if fetch.done()]:
            del self._seen[block]
        return nbytes


def _fetched(block: Block) -> bytes:
    CACHE.block(*block)
    return b""


class ReadAhead(Callback, Meter):
    """Callback that prefetches samples, and logs `data_wait_ms`: the mean time per step that a rank waited for
    samples."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.limit = config.options(ObjectStorageFlags).storage_read_ahead_megabytes * 1_000_000
        self.waited, self.steps = 0.0, 0
        """`waited` is the value that `DataIterator.waited` had when `data_wait_ms` was last logged, in seconds. `steps`
        is the number of steps that have begun since that time."""

        self._counted = -1
        self.window: Window | None = None
        self._wake, self._step = threading.Condition(), range(0)
        self._closed = False

    def meters(self, run: TrainingRun) -> list[Meter]:
        self.device, self.world = run.runtime.device, run.runtime.state.world.size
        self.train = run.data.train
        if self.limit:
            self.window = Window(self.train, self.limit)
        self._size = lambda: run.batch_sizes.at(run.progress.consumed_samples)
        return [self]

    def on_start(self, run: RunView) -> None:
        """Fetch and prepare the samples of the first step, and print the download rate."""
        if self.window is None:
            return
        before, began = LIMITS.traffic.read, time.monotonic()
        first = run.progress.consumed_samples
        self._step = range(first, first + self._size())
        for fetch in self.window.begin(self._step):
            fetch.exception()  # if the fetch has failed, reading the sample raises the error
        self.train.prepare_step(first, len(self._step))
        seconds, moved = time.monotonic() - began, (LIMITS.traffic.read - before) / 1e6
        rate = f" in {seconds:.1f} s, {moved / max(seconds, 1e-9):.0f} MB/s" if moved else ", all from the cache"
        run.say(f" data: {moved:.1f} MB read for step {run.progress.iteration + 1}{rate}; cache {CACHE.folder}")
        threading.Thread(target=self._follow, name="read-ahead", daemon=True).start()

    def begin_step(self, step: Step) -> None:
        if step.iteration != self._counted:  # count each step once, even if it begins twice
            self._counted = step.iteration
            self.steps += 1
        with self._wake:
            self._step = range(step.first_sample, step.first_sample + step.samples)
            self._wake.notify()

    def on_end(self, run: RunView) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()

    def take(self) -> Tensor:
        """Return two values as a float64 tensor of shape [2]: the number of seconds that training waited for data since
        the last call of this method, and the number of steps since the last call. Then reset both values to 0."""
        waited = self.train.waited
        taken = torch.tensor([waited - self.waited, self.steps], dtype=torch.float64, device=self.device)
        self.waited, self.steps = waited, 0
        return taken

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        seconds, steps = summed.tolist()
        return {"data_wait_ms": round(1000 * seconds / steps, 3)} if steps else {}

    def lines(self, record: Record) -> list[str]:
        wait = record.get("data_wait_ms")
        return [f" data wait {wait:.1f} ms per step"] if isinstance(wait, float) else []

    def _follow(self) -> None:
        """Whenever a step begins, start fetching the samples of later steps. This method runs in a separate thread."""
        assert self.window is not None
        step = range(0)
        while True:
            with self._wake:
                while self._step == step and not self._closed:
                    self._wake.wait()
                step = self._step
                if self._closed:
                    self.window.close()
                    return
            self.window.move(step)
