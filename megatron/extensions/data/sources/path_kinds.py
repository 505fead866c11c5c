"""Recognizes --data-path values that name data sets of the libraries `datasets`, `webdataset` and `mosaicml-streaming`.
This module does not import torch, and imports a library only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.dist_checkpointing.file_storage import UrlPath, located
from megatron.core.dist_checkpointing.path_kind import DataKind, DataReader
from megatron.core.registry import imported
from megatron.extensions.data.sources.hugging_face import SCHEME, is_saved
from megatron.extensions.data.sources.mosaic import is_mosaic
from megatron.extensions.data.sources.web_shards import is_shard, shards_of

if TYPE_CHECKING:
    from megatron.extensions.data.sources.documents import Documents


class SourceKind(DataKind):
    """Path kind for --data-path values that name data sets of one library. `documents` is the name of the class that
    reads these data sets. `holds` is a function that returns True if the library can read a given path."""

    urls = True

    def __init__(self, documents: str, library: str, holds: Callable[[str], bool], scheme: str = "") -> None:
        self.documents = documents
        self.library = library
        self.holds = holds
        self.scheme = scheme

    def __call__(self, path: str) -> bool:
        return bool(self.scheme and path.startswith(self.scheme)) or self.holds(path)

    def describe(self, flag: str, path: str) -> str:
        return f"{path}: read by {self.library} and tokenized when the run starts"

    def reader(
        self, data: DatasetConfig, tokenizer: TokenizerConfig, vocab_size: int | None, prepare: Callable[[], object]
    ) -> DataReader:
        made = imported(f"{__package__}.tokenized_source:SourceData")
        found: DataReader = made(data, tokenizer, vocab_size, prepare, self)
        return found

    def opened(self, flag: str, path: str, wanted: str) -> Documents:
        """Open the data set at `path` and return its documents. `wanted` is the value of --text-key. Raises ValueError
        with the name of the flag if the library is missing, or if files are missing, damaged or in a different
        format."""
        opens: Callable[[str, str], Documents] = imported(f"{__package__}.{self.documents}")
        try:
            documents = opens(path.removeprefix(self.scheme), wanted)
            documents.name = path
            documents.first()
        except Exception as error:
            # Every exception is caught, because each library defines its own exception classes.
            raise ValueError(f"{flag} {path}: {error}") from error
        return documents


def _has_shards(path: str) -> bool:
    """Return True if a path refers to tar files. If the path contains a range in braces, this function does not check
    that the files exist, because the reader reports missing shards. URLs are recognized by their names, without a
    request."""
    if "://" in path:
        return isinstance(located(path), UrlPath) and is_shard(path)
    return is_shard(path.partition("}")[2]) if "{" in path else bool(shards_of(path))


HUGGING_FACE = SourceKind("hugging_face:HuggingFaceDocuments", "datasets", is_saved, SCHEME)
WEB_SHARDS = SourceKind("web_shards:WebDocuments", "webdataset", _has_shards)
MOSAIC = SourceKind("mosaic:MosaicDocuments", "mosaicml-streaming", is_mosaic)
