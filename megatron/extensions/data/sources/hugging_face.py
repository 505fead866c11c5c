"""Data sets of Hugging Face's `datasets`: folders of `save_to_disk`, and files of rows that it reads."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from megatron.extensions.data.sources.documents import Documents, Value, chosen_key, document_of, library, shown_files
from megatron.extensions.data.text_data.inputs import by_name

SCHEME = "datasets:"
"""Before a path: read its files by `datasets` and not as text."""

ROWS = 1024
"""Rows that are taken at a time."""

READERS = {"parquet": "parquet", "arrow": "arrow", "jsonl": "json", "json": "json", "csv": "csv", "text": "text"}
"""Format of a file -> the name of its reader in `datasets`."""

ONE_SET, SEVERAL_SETS = ("state.json", "dataset_info.json"), "dataset_dict.json"
"""Files of a folder of `save_to_disk`: of a data set, and of one with a folder for each split."""


def is_saved(path: str) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    names = (os.path.join(path, name) for name in (*ONE_SET, SEVERAL_SETS))
    *one, several = map(os.path.isfile, names)
    return all(one) or several


class HuggingFaceDocuments(Documents):
    """Rows of a folder of `save_to_disk`, or of Parquet, Arrow, JSON, CSV or text files."""

    def __init__(self, path: str, wanted: str) -> None:
        self._library = library("datasets", "datasets")
        self._path = path
        if self._saved and os.path.isfile(os.path.join(path, SEVERAL_SETS)):
            splits = sorted(name for name in os.listdir(path) if is_saved(os.path.join(path, name)))
            example = os.path.join(path, (splits or ["SPLIT"])[0])
            raise ValueError(f"has a folder for each split; name one of {', '.join(splits)}, as {example}")
        self.files = self._files()
        first = next(iter(self._batches(1)), {})
        self.key = chosen_key(wanted, first)

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
            raise ValueError(f"there is no file that datasets reads; the path is taken from {os.getcwd()}")
        return found

    def _batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Mapping[str, list[object]]]:
        """Rows in the order of the files, as lists by column."""
        if self._saved:
            opened = self._library.load_from_disk(self._path)
        else:
            readers = {READERS[str(by_name(path)[0])] for path in self.files}
            if len(readers) > 1:
                raise ValueError(
                    f"files of several formats, {', '.join(sorted(readers))}; name those of one, by a glob"
                )
            (reader,) = readers
            # Streamed: otherwise the library would first copy all rows into its own cache.
            opened = self._library.load_dataset(reader, data_files=self.files, split="train", streaming=True)
        if columns is not None:
            opened = opened.select_columns(columns)
        yield from cast("Iterable[Mapping[str, list[object]]]", opened.iter(batch_size=rows))

    def __iter__(self) -> Iterator[Value]:
        for batch in self._batches(ROWS, [self.key]):
            yield from map(document_of, batch[self.key])
