"""Reader of data sets through Hugging Face's library `datasets`. The data sets are folders written by `save_to_disk`,
files in formats such as Parquet, or data sets on the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from megatron.core.dist_checkpointing.file_storage import UrlPath, local_folder, located
from megatron.extensions.data.sources.documents import (
    Documents,
    Value,
    chosen_key,
    document_of,
    library,
    shown_files,
    stored_names,
)
from megatron.extensions.data.text_data.inputs import by_name

SCHEME = "datasets:"
"""Path prefix that selects `datasets` as the reader of files, instead of the reader of text files."""

ROWS = 1024
"""Number of rows per batch that is read from the library."""

READERS = {"parquet": "parquet", "arrow": "arrow", "jsonl": "json", "json": "json", "csv": "csv", "text": "text"}
"""Mapping from file format to the name of the reader in `datasets`."""

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}")
"""Name of a data set on the hub, such as allenai/c4, allenai/c4:en or allenai/c4:en:validation."""

ONE_SET, SEVERAL_SETS = ("state.json", "dataset_info.json"), "dataset_dict.json"
"""Names of files by which folders written by `save_to_disk` are recognized. A folder with a single data set contains
the two files in `ONE_SET`. A folder with one subfolder per split contains the file `SEVERAL_SETS`."""


class Rows(Protocol):
    """Protocol of a data set of the `datasets` library, restricted to the methods that this module calls."""

    def __iter__(self) -> Iterator[Mapping[str, object]]: ...

    def __len__(self) -> int: ...

    def iter(self, batch_size: int) -> Iterator[Mapping[str, list[object]]]: ...

    def select_columns(self, names: list[str]) -> Rows: ...

    def select(self, numbers: range) -> Rows: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


def is_saved(path: str) -> bool:
    """Return True if a folder was written by `save_to_disk`."""
    names = (os.path.join(path, name) for name in (*ONE_SET, SEVERAL_SETS))
    *one, several = map(os.path.isfile, names)
    return all(one) or several


def _copied(path: str) -> str:
    """Return a local path unchanged. For a URL, copy the files to a local folder, and return this folder or a glob of
    the copies. All processes on a host share the folder."""
    place = located(path)
    if not isinstance(place, UrlPath):
        if "://" in path:
            raise ValueError("URLs must refer to object storage, such as datasets:s3://bucket/folder")
        return path
    if stored_names(place):
        return str(local_folder(place, _is_shown))
    return str(local_folder(place.parent, partial(_is_shown, pattern=place.name)))


def _is_shown(name: str, pattern: str = "*") -> bool:
    return not name.startswith(".") and fnmatch.fnmatch(name, pattern)


class HuggingFaceDocuments(Documents):
    """Rows from a folder of `save_to_disk`, from Parquet, Arrow, JSON, CSV or text files, or from a data set on the
    Hugging Face hub. A data set on the hub is streamed and not stored. The attribute `named` is True for a data set on
    the hub."""

    def __init__(self, path: str, wanted: str) -> None:
        self._library = library("datasets", "datasets")
        self._path = _copied(path)
        self.named = bool(HUB_NAME.fullmatch(path)) and not os.path.exists(path)
        if self._saved and os.path.isfile(os.path.join(path, SEVERAL_SETS)):
            splits = sorted(name for name in os.listdir(path) if is_saved(os.path.join(path, name)))
            example = os.path.join(path, (splits or ["SPLIT"])[0])
            raise ValueError(f"has a folder for each split ({', '.join(splits)}); name one of them, such as {example}")
        self.files = [] if self.named else self._files()
        self.key = chosen_key(wanted, next(iter(self._opened()), {}))

    @property
    def _saved(self) -> bool:
        return is_saved(self._path)

    def _files(self) -> list[str]:
        if self._saved or os.path.isdir(self._path):
            found = shown_files(self._path)
        else:
            found = sorted(path for path in glob.glob(self._path, recursive=True) if os.path.isfile(path))
        if not self._saved:
            found = [path for path in found if by_name(path)[0] in READERS]
        if not found:
            raise ValueError(f"there is no file that datasets reads; the path is relative to {os.getcwd()}")
        return found

    def _opened(self) -> Rows:
        if self._saved:
            found: Rows = self._library.load_from_disk(self._path)
            return found
        if self.named:
            name, _, rest = self._path.partition(":")
            config, _, split = rest.partition(":")
            found = self._library.load_dataset(name, config or None, split=split or "train", streaming=True)
            return found
        readers = {READERS[str(by_name(path)[0])] for path in self.files}
        if len(readers) > 1:
            raise ValueError(f"files of several formats, {', '.join(sorted(readers))}; name one format by a glob")
        (reader,) = readers
        # Without streaming, the library would first copy all rows into its own cache.
        found = self._library.load_dataset(reader, data_files=self.files, split="train", streaming=True)
        return found

    def __iter__(self) -> Iterator[Value]:
        for batch in self._opened().select_columns([self.key]).iter(batch_size=ROWS):
            yield from map(document_of, batch[self.key])

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """Yield pairs of a cursor and a document, starting at the document to which `cursor` refers. A cursor is a row
        number. If rows are streamed, a cursor is instead a list of two items: a state that the library saved, and the
        number of rows that were read after this state."""
        rows = self._opened().select_columns([self.key])
        if self._saved:
            first = cursor if isinstance(cursor, int) else 0
            for number, row in enumerate(rows.select(range(first, len(rows))), first):
                yield number, document_of(row[self.key])
            return
        state, after = cursor if isinstance(cursor, list) else (None, 0)
        if state is not None:
            rows.load_state_dict(state)
        state, passed = rows.state_dict(), 0
        for row in rows:
            if passed >= after:
                yield [state, passed], document_of(row[self.key])
            passed += 1
            if passed == ROWS and passed >= after:
                state = rows.state_dict()
                passed = after = 0
