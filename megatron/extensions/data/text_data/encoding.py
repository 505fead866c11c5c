"""Tokenization of chunks of records, in this process or in several worker processes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.data import TokenizerConfig
from megatron.core.tokenizers import added_after, build_tokenizer
from megatron.extensions import load
from megatron.extensions.data.datasets.indexed_writer import best_dtype
from megatron.extensions.data.text_data.fast_tokenizer import stand_in_for
from megatron.extensions.data.text_data.formats import Chunk, Reading, is_blank, texts_of

CHUNK_BYTES = 1 << 18
CHUNKS_IN_FLIGHT = 3  # in each worker


@dataclass(frozen=True)
class Job:
    """Settings that a process needs to tokenize chunks."""

    tokenizer: TokenizerConfig
    vocab_size: int | None
    reading: Reading
    append_eod: bool
    prepare: Callable[[], object]
    """Function that each worker process calls first, to register the user's tokenizers."""

    stand_in: bool = False
    """True to tokenize with the package gigatoken instead of the configured tokenizer."""


@dataclass
class Encoded:
    """Result of tokenizing a chunk. For each JSON key or table column that contains documents, there is one array of
    concatenated tokens and one array of document lengths."""

    tokens: list[NDArray]
    lengths: list[NDArray[np.int32]]
    bad: list[tuple[int, str]]
    blank: int
    peak_memory: int
    """Peak memory, in bytes, of the process that tokenized the chunk."""

    compared: int
    """Number of characters in the chunk for which the ids of gigatoken and of the original tokenizer were compared."""


class Encoder:
    """Tokenizer of chunks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
        self.stand_in = stand_in_for(self.tokenizer) if job.stand_in else None
        self.dtype = best_dtype(self.tokenizer.vocab_size)
        eod = self.tokenizer.eod
        ends_itself = added_after(self.tokenizer)[-1:] == [eod]
        self.ending = [eod] if job.append_eod and eod is not None and not ends_itself else []

    def __call__(self, chunk: Chunk) -> Encoded:
        reading = self.job.reading
        parts: list[list[NDArray]] = [[] for _ in reading.keys]
        bad, blank = [], 0
        compared = self.stand_in.compared if self.stand_in is not None else 0
        for number, record in enumerate(chunk.records, chunk.first):
            if is_blank(record):
                blank += 1
                continue
            try:
                documents = [self._encode(text) for text in texts_of(record, chunk, reading)]
            except ValueError as error:
                bad.append((number, str(error)))
                continue
            for part, document in zip(parts, documents, strict=True):
                part.append(document)
        return Encoded(
            [np.concatenate(part) if part else np.empty(0, self.dtype) for part in parts],
            [np.array([len(document) for document in part], np.int32) for part in parts],
            bad,
            blank,
            peak_memory(),
            self.stand_in.compared - compared if self.stand_in is not None else 0,
        )

    def _encode(self, text: str) -> NDArray:
        tokenizer = self.stand_in or self.tokenizer
        try:
            ids = tokenizer.tokenize(text) if text else []
        except UnicodeEncodeError as error:
            raise ValueError(f"not Unicode text: {error.reason} at character {error.start}") from None
        # No end-of-document token is added to an empty document.
        document = np.empty(len(ids) + len(self.ending) if len(ids) else 0, self.dtype)
        if len(ids):
            document[: len(ids)], document[len(ids) :] = ids, self.ending
        return document


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_encoder: Encoder | None = None


def _start_worker(job: Job) -> None:
    global _encoder
    # The worker processes already run in parallel, so tokenizers must not start threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # On Ctrl+C, the parent process stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load()
    job.prepare()
    _encoder = Encoder(job)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _encoder is not None
    return _encoder(chunk)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context manager that delays termination signals until the end of the block."""
    # Other threads need no delay, because Python handles signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def encode_all(job: Job, chunks: Iterable[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Encode chunks in `workers` parallel processes. Yield each chunk and its encoding, in order. The number of chunks
    in memory is bounded."""
    if workers == 1:
        encoder = Encoder(job)
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    # Workers are spawned, because a forked process would inherit locks that other threads hold.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
    try:
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            with _undisturbed():  # If a signal arrived while the pool starts a worker, this worker would keep running.
                pending.append((chunk, pool.submit(_encode_in_worker, chunk)))
            if len(pending) >= CHUNKS_IN_FLIGHT * workers:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise ValueError(
            f"a worker process was killed, most likely because memory ran out; use fewer than --workers {workers}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
