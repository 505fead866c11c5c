"""Samples that are built from documents during training. Documents are read and tokenized only when they are needed,
and the position at which each sample starts is recorded.

Documents are shuffled within windows of the stream, by a permutation that depends on the seed, the epoch and the window
number. The shuffled documents are concatenated and cut into samples as in Megatron-LM, where adjacent samples share one
token. The start position of a sample determines this sample and all following samples. To read a sample whose start
position is unknown, the stream reads forward from the nearest earlier sample with a known position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.data.sources.documents import Documents, Value

KEPT = 1 << 16
"""Maximum number of samples whose start positions are kept in memory."""


class Place(NamedTuple):
    """Position in the stream at which a sample starts."""

    epoch: int = 0
    window: int = 0
    """Number of the window within the epoch."""

    cursor: object = None
    """Cursor of the first document of the window, as `Documents.read_from` yields it."""

    document: int = 0
    """Number of documents of the window that have been consumed. The documents of a window are consumed in shuffled
    order."""

    token: int = 0
    """Number of tokens of the current document that have been consumed."""


class SampleStream:
    """Stream of samples that are built from documents and have `length` + 1 tokens each."""

    def __init__(
        self, documents: Documents, encode: Callable[[Value], NDArray[np.int64]], length: int, seed: str, window: int
    ) -> None:
        self.documents = documents
        self.encode = encode
        self.length = length
        self.seed = seed
        self.window = window
        self._lock = Lock()
        self._numbers = [0]
        self._places = {0: Place()}

    def place(self, sample: int) -> Place:
        """Return the position at which a sample starts. If this position has not been recorded yet, read the stream up
        to the sample."""
        with self._lock:
            found = self._places.get(sample)
        if found is None:
            next(self(sample))
            found = self._places[sample]
        return found

    def know(self, sample: int, place: Place) -> None:
        """Record the position at which a sample starts."""
        # The lock is needed, because a checkpoint may request positions while threads read samples.
        with self._lock:
            if sample in self._places:
                return
            self._places[sample] = place
            self._numbers.insert(bisect_right(self._numbers, sample), sample)
            if len(self._numbers) > KEPT:
                del self._places[self._numbers.pop(1)]

    def __call__(self, first: int) -> Iterator[NDArray[np.int64]]:
        """Yield the samples of the stream, starting with sample number `first`."""
        with self._lock:
            number = self._numbers[bisect_right(self._numbers, first) - 1]
            place = self._places[number]
        documents = self._documents_from(place)
        held: deque[tuple[Place, NDArray[np.int64]]] = deque()
        offset, count = place.token, -place.token
        while True:
            while count <= self.length:
                held.append(next(documents))
                count += len(held[-1][1])
            if number >= first:
                text = np.concatenate([ids for _, ids in held])
                yield text[offset : offset + self.length + 1]
            number += 1
            offset += self.length
            count -= self.length
            while offset >= len(held[0][1]):
                offset -= len(held.popleft()[1])
            self.know(number, held[0][0]._replace(token=offset))

    def _documents_from(self, place: Place) -> Iterator[tuple[Place, NDArray[np.int64]]]:
        """Yield the position and the token ids of each document, starting at the position `place`. The iterator
        continues through all later epochs."""
        epoch, window, cursor, behind, _ = place
        while True:
            some = False
            documents = self.documents.read_from(cursor)
            while read := list(islice(documents, self.window)):
                order = self._order(epoch, window, len(read))
                for number in range(behind, len(read)):
                    _, value = read[order[number]]
                    ids = self.encode(value)
                    some = some or len(ids) > 0
                    yield Place(epoch, window, read[0][0], number), ids
                behind = 0
                window += 1
            if not some and cursor is None:
                raise ValueError("the data stream contains no tokens")
            epoch += 1
            window, cursor = 0, None

    def _order(self, epoch: int, window: int, documents: int) -> NDArray[np.int64]:
        drawn = blake2b(f"{self.seed} {epoch} {window}".encode(), digest_size=4).digest()
        return np.random.RandomState(int.from_bytes(drawn, "little")).permutation(documents)
