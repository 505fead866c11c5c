"""Tokenize a corpus on several machines: assign documents to shards, and join the shards' datasets.

Shard i of n contains consecutive documents, so that the concatenated datasets of all shards equal the dataset that a
single machine would write. Uncompressed JSON lines files can be split between shards. Any other file belongs to a
single shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.extensions.data.datasets.indexed_writer import SUMS, IndexedDatasetBuilder, read_sums
from megatron.extensions.data.text_data.formats import Chunk, Reading, read_chunks
from megatron.extensions.data.text_data.inputs import TextFile


class Shard(NamedTuple):
    """Part of a corpus that is divided into `count` shards. `number` is the index of the shard, counted from 0."""

    number: int
    count: int

    @classmethod
    def of_text(cls, text: str) -> Shard:
        """Parse a shard specification: `1/8` is the first of eight shards. Raises ValueError for any other text."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"--shard {text}: must be NUMBER/COUNT with NUMBER from 1 to COUNT, such as 1/8")
        return cls(int(found[1]) - 1, int(found[2]))

    def prefix(self, prefix: str) -> str:
        """Return the prefix of the shard's dataset."""
        return f"{prefix}.shard-{self.number + 1:05d}-of-{self.count:05d}"

    @property
    def all(self) -> list[Shard]:
        return [Shard(number, self.count) for number in range(self.count)]

    def holds(self, position: int, total: int) -> bool:
        """Return True if the byte at `position` of a corpus with `total` bytes belongs to this shard."""
        return self.owner(position, total) == self.number

    def owner(self, position: int, total: int) -> int:
        """Return the number of the shard to which a byte of the corpus belongs."""
        return min(position * self.count // max(1, total), self.count - 1)


def is_divided(file: TextFile) -> bool:
    """Return True if a file can be split between shards."""
    return file.compression == "" and file.format in (None, "jsonl")


def of_shard(files: Sequence[TextFile], shard: Shard) -> list[tuple[TextFile, int]]:
    """Return the files that belong to a shard entirely or in part. Each file is paired with the total number of bytes
    in the files before it."""
    total, begin = sum(file.size for file in files), 0
    found = []
    for file in files:
        last = begin + max(0, file.size - 1) if is_divided(file) else begin
        if shard.owner(begin, total) <= shard.number <= shard.owner(last, total):
            found.append((file, begin))
        begin += file.size
    return found


def chunks_of_shard(files: Sequence[TextFile], reading: Reading, chunk_bytes: int, shard: Shard) -> Iterator[Chunk]:
    """Yield the chunks of a shard. If a file is split between shards, its text before this shard's part is read and
    discarded."""
    total = sum(file.size for file in files)
    for file, begin in of_shard(files, shard):
        position = 0
        for chunk in read_chunks([file], reading, chunk_bytes):
            owner = shard.owner(begin + (min(position, max(0, file.size - 1)) if is_divided(file) else 0), total)
            if owner > shard.number:
                break
            if owner == shard.number:
                yield chunk
            position += chunk.size


def corpus_digest(files: Iterable[TextFile], settings: object) -> str:
    """Return a digest of the settings, and of the names and sizes of the files. Shards of the same corpus have equal
    digests."""
    listed = [(PurePath(file.path).name, file.size) for file in files]
    return blake2b(repr((listed, settings)).encode(), digest_size=16).hexdigest()


def missing_shards(prefix: str, shard: Shard, corpus: str) -> list[int]:
    """Return the numbers, counted from 1, of shards with an incomplete dataset. Raises ValueError if a dataset belongs
    to another corpus."""
    missing = []
    for each in shard.all:
        found = read_sums(each.prefix(prefix))
        if found is None:
            missing.append(each.number + 1)
        elif found.get("corpus") != corpus:
            raise ValueError(
                f"{each.prefix(prefix)}: made from other files or with other flags; delete it, and tokenize that shard "
                "again"
            )
    return missing


def join_shards(prefix: str, shard: Shard, dtype: np.dtype) -> bool:
    """Join the datasets of all shards into one, and delete the datasets of the shards. Return False if another machine
    has already joined the shards."""
    try:
        with IndexedDatasetBuilder(prefix, dtype, described={}) as builder:
            for each in shard.all:
                builder.add_dataset(IndexedDataset(each.prefix(prefix)))
    except (OSError, ValueError):
        if read_sums(prefix) is None:
            raise
        return False
    for each in shard.all:
        for suffix in (SUMS, ".idx", ".bin"):
            path = located(each.prefix(prefix) + suffix)
            with suppress(FileNotFoundError):
                storage_of(path).remove(path)
    return True
