"""Indexed datasets of tests, and disks without room."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_documents(prefix: Path | str, documents: Iterable[Any], dtype: Any = "<u2") -> str:
    """Writes an indexed dataset and returns its prefix."""
    with IndexedDatasetBuilder(str(prefix), np.dtype(dtype)) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: as on a full disk, a write fails in the midst of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):  # what is imported now would be cut short on disk
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
