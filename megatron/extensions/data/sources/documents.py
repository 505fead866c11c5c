"""Documents as a library reads them: texts, or token ids that are taken as they are."""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from itertools import islice
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.file_storage import UrlPath, located, storage_of
from megatron.extensions.data.text_data.inputs import TextFile, files_below

Value = str | bytes | NDArray | ValueError
"""A text, token ids [n], or the problem of a record."""

DEFAULT_KEY = "text"
TOKEN_KEYS = ("input_ids", "tokens")
"""Columns that are taken if there is no column of the default name."""


class Documents(ABC):
    """The documents of a data set, in the order of its files. Errors of users are ValueErrors."""

    unit = "row"
    """Name of a record in messages."""

    name: str
    """The data set as the flag names it."""

    key: str
    """Column, or member of a sample, that holds the documents."""

    files: list[str]
    """Files that decide the documents: paths, or URLs of object storage."""

    @abstractmethod
    def __iter__(self) -> Iterator[Value]:
        """The value of `key` in each record."""

    def read_from(self, cursor: object) -> Iterator[tuple[object, Value]]:
        """The documents from a cursor on, each with its own, of JSON's types; None is the beginning."""
        number = cursor if isinstance(cursor, int) else 0
        yield from enumerate(islice(self, number, None), number)

    def first(self) -> Value:
        """The first document. Raises ValueError if there is none."""
        for value in self:
            return value
        raise ValueError("it has no document")


def library(module: str, extra: str) -> ModuleType:
    """An imported library. Raises ValueError that names the extra if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"needs the extra [{extra}] ({error}): pip install 'paritrain[{extra}]'") from None


def chosen_key(wanted: str, names: Collection[str]) -> str:
    """The column of documents: the one that --text-key names, or one of token ids where its default is no column."""
    if wanted in names:
        return wanted
    for key in TOKEN_KEYS if wanted == DEFAULT_KEY else ():
        if key in names:
            return key
    raise ValueError(f"no column {wanted!r} (--text-key); the columns are {', '.join(map(repr, sorted(names)[:8]))}")


def document_of(value: object) -> Value:
    """A value of a column as a document."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            return ids.astype(np.int64) if ids.dtype.kind not in "iu" else ids
        return ValueError(f"neither text nor a list of token ids but {ids.ndim} dimensions of {ids.dtype}")
    return ValueError(f"neither text nor token ids but {type(value).__name__}")


def local_path(path: str) -> str:
    """The path of a local file, or of the copy of a URL's file, which the processes of a host share. Raises OSError."""
    place = located(path)
    return str(storage_of(place).local_file(place)) if isinstance(place, UrlPath) else path


def size_of(path: str) -> int:
    """Bytes of a file. Raises OSError."""
    place = located(path)
    size = storage_of(place).size(place)
    if size is None:
        raise FileNotFoundError(f"there is no {path}")
    return size


def stored_names(folder: UrlPath, pattern: str = "*") -> list[str]:
    """Names in a folder of a URL that match a pattern, sorted, hidden ones excepted. Raises OSError."""
    names = storage_of(folder).names(folder)
    return sorted(name for name in fnmatch.filter(names, pattern) if not name.startswith("."))


def text_files(paths: Sequence[str]) -> list[TextFile]:
    """Files as digests of them are taken."""
    places = (os.path.realpath(local_path(path)) for path in paths)  # of copies, behind links of this process
    states = [(path, os.stat(path)) for path in places]
    return [TextFile(path, None, "", state.st_size, str(state.st_mtime_ns)) for path, state in states]


def shown_files(folder: str) -> list[str]:
    """Files below a folder, hidden ones excepted, sorted."""
    return sorted(path for path in files_below(folder) if not os.path.basename(path).startswith("."))
