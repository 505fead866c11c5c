"""Shards of mosaicml-streaming: a folder with index.json and MDS, JSON or CSV shards, which may be compressed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

from megatron.extensions.data.sources.documents import Documents, Value, chosen_key, document_of, library, shown_files

INDEX = "index.json"

DEFAULTS = {"split": "", "download_retry": 2, "download_timeout": 60, "validate_hash": None, "keep_zip": False}
"""Default settings that are applied to each stream of the library."""


def is_mosaic(path: str) -> bool:
    """Return True if a folder contains an index of MosaicML shards."""
    try:
        with open(os.path.join(path, INDEX), encoding="utf-8") as stream:
            start = stream.read(1 << 16)
    except (OSError, UnicodeDecodeError):
        return False
    return '"shards"' in start and '"version"' in start


class MosaicDocuments(Documents):
    """Documents that are read from MosaicML shards. Each sample contains one document. The library rejects columns that
    contain pickles, because a pickle could run code."""

    unit = "sample"

    def __init__(self, path: str, wanted: str) -> None:
        self._streams = library("streaming.base.stream", "streaming")
        self._world = library("streaming.base.world", "streaming").World(1, 1, 1, 0)
        self._path = path
        self.files = shown_files(path)
        with open(os.path.join(path, INDEX), encoding="utf-8") as stream:
            shards = json.load(stream)["shards"]
        stored = set(map(os.path.basename, self.files))
        packed = (info["raw_data"]["basename"] for info in shards if info.get("zip_data"))
        self._compressed = any(name not in stored for name in packed)
        self.key = chosen_key(wanted, shards[0]["column_names"] if shards else ())

    def __iter__(self) -> Iterator[Value]:
        return (value for _, value in self.read_from(None))

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """Yield pairs of a cursor and a document, starting at the document to which `cursor` refers. A cursor is a list
        of the shard number and the sample number in the shard."""
        first, begin = cursor if isinstance(cursor, list) else (0, 0)
        with ExitStack() as folders:
            stream = self._streams.Stream(local=self._path)
            if self._compressed:
                # Decompress one shard at a time into a temporary folder.
                copies = folders.enter_context(tempfile.TemporaryDirectory())
                stream = self._streams.Stream(remote=os.path.abspath(self._path), local=copies)
            stream.apply_default(DEFAULTS)
            shards = stream.get_shards(self._world, allow_unsafe_types=False)
            for place, shard in enumerate(shards[first:], first):
                stream.prepare_shard(shard)
                for number in range(begin if place == first else 0, len(shard)):
                    yield [place, number], document_of(shard[number][self.key])
                if self._compressed:
                    shard.evict()
