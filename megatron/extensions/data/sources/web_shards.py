"""Shards of WebDataset: tar files in which all members of a sample have the same name before the first dot."""

from __future__ import annotations

import glob
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from megatron.core.dist_checkpointing.file_storage import UrlPath, located
from megatron.extensions.data.sources.documents import (
    DEFAULT_KEY,
    TOKEN_KEYS,
    Documents,
    Value,
    document_of,
    library,
    local_path,
    shown_files,
    stored_names,
)

T = TypeVar("T")

SUFFIXES = (".tar", ".tar.gz", ".tgz")
DECODED = ("txt", "text", "transcript", "json", "jsn", "npy")
"""File extensions of the tar members that are decoded. Pickles, which could run code, are not read."""

PLAIN = ("txt", "text", "transcript")


def is_shard(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def shards_of(path: str) -> list[str]:
    """Return the sorted shards of a folder, file, glob, or range in braces such as shard-{000..131}.tar. The list is
    empty if there are no shards. For a range in braces, the result also contains the names of files that do not exist,
    so that the caller can report missing shards."""
    place = located(path)
    if isinstance(place, UrlPath):
        return _stored_shards(path, place)
    if os.path.isdir(path):
        return [file for file in shown_files(path) if is_shard(file)]
    if os.path.isfile(path):
        return [path] if is_shard(path) else []
    if "{" in path:
        expanded = library("braceexpand", "webdataset").braceexpand(path)
        return list(expanded)
    return sorted(file for file in glob.glob(path, recursive=True) if is_shard(file))


def _stored_shards(url: str, place: UrlPath) -> list[str]:
    """Return the shards that a URL names. The last part of the URL may be a glob or contain a range in braces."""
    if "{" in url:
        return list(library("braceexpand", "webdataset").braceexpand(url))
    return [str(place.parent / name) for name in stored_names(place.parent, place.name) if is_shard(name)]


def missing_shard(files: Sequence[str]) -> str | None:
    """Return the path of the first shard in `files` that does not exist. Return None if all shards exist. For URLs, the
    function sends one request per folder. Raises OSError."""
    places = [located(file) for file in files]
    folders = {place.parent for place in places if isinstance(place, UrlPath)}
    stored = {folder / name for folder in folders for name in stored_names(folder)}
    for file, place in zip(files, places, strict=True):
        if place not in stored if isinstance(place, UrlPath) else not os.path.isfile(file):
            return file
    return None


def _intact(samples: Iterable[T], shard: str) -> Iterator[T]:
    """Yield the samples of a shard. Raises ValueError with the name of the shard if the tar file is damaged."""
    try:
        yield from samples
    except (tarfile.TarError, EOFError, zlib.error) as error:
        why = " ".join(map(str, error.args[:1]))
        raise ValueError(f"{shard}: the tar file is truncated or damaged ({why}); restore it from a copy") from None


class WebDocuments(Documents):
    """Documents that are read from WebDataset shards. Each sample contains one document.

    --text-key names the extension of the member that contains the document, such as `txt` or `npy`, or a field of the
    member `json`. Without --text-key, the document is the member `txt` of the sample, the field `text` of the member
    `json`, or the token ids in the field `input_ids`."""

    unit = "sample"

    def __init__(self, path: str, wanted: str) -> None:
        self._library = library("webdataset", "webdataset")
        self._decode = library("webdataset.autodecode", "webdataset").basichandlers
        self._wanted = self.key = wanted
        self.files = shards_of(path)
        if (missing := missing_shard(self.files)) is not None:
            raise ValueError(f"there is no shard {missing}; correct the range")
        if not self.files:
            where = "" if isinstance(located(path), UrlPath) else f"; the path is relative to {os.getcwd()}"
            raise ValueError(f"there is no shard ({', '.join(SUFFIXES)}){where}")
        found = self.first()
        if isinstance(found, ValueError):
            raise found

    def __iter__(self) -> Iterator[Value]:
        return (value for _, value in self.read_from(None))

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """Yield pairs of a cursor and a document, starting at the document to which `cursor` refers. A cursor is a list
        of the shard number and the sample number in the shard."""
        first, begin = cursor if isinstance(cursor, list) else (0, 0)
        for place, shard in enumerate(self.files[first:], first):
            # The path is made absolute, because the library could interpret a relative name as a command, such as
            # pipe:COMMAND.
            samples = self._library.WebDataset(
                [os.path.abspath(local_path(shard))],
                shardshuffle=False,
                nodesplitter=None,
                workersplitter=None,
                empty_check=False,
            )
            begun = islice(_intact(samples, shard), begin if place == first else 0, None)
            for number, sample in enumerate(begun, begin if place == first else 0):
                try:
                    yield [place, number], document_of(self._value(sample))
                except ValueError as error:
                    where = f"{os.path.basename(shard)}, {sample['__key__']}"
                    yield [place, number], ValueError(f"{where}: {error}")

    def _value(self, sample: Mapping[str, bytes]) -> object:
        plain = [name for name in PLAIN if name in sample]
        if self._wanted in sample:
            return self._decoded(self._wanted, sample)
        if self._wanted == DEFAULT_KEY and plain:
            return self._decoded(plain[0], sample)
        fields: object = next((self._decoded(name, sample) for name in ("json", "jsn") if name in sample), {})
        others = TOKEN_KEYS if self._wanted == DEFAULT_KEY else ()
        if isinstance(fields, dict):
            for name in (self._wanted, *others):
                if name in fields:
                    return fields[name]
        for name in others:
            if f"{name}.npy" in sample:
                return self._decoded(f"{name}.npy", sample)
        members = [name for name in sample if not name.startswith("__")]
        inside = f"; the member json has {', '.join(map(repr, fields))}" if isinstance(fields, dict) and fields else ""
        raise ValueError(f"no member {self._wanted!r} (--text-key); the members of the sample are {members}{inside}")

    def _decoded(self, name: str, sample: Mapping[str, bytes]) -> object:
        if name.rpartition(".")[2] not in DECODED:
            raise ValueError(f"{name}: not read as a document; --text-key may name {', '.join(DECODED)}")
        return self._decode(name, sample[name])
