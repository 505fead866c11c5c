"""Training on text files, which are tokenized once into a cached indexed dataset.

The dataset is identical to the output of tools/preprocess_data.py for the same files, so a run reads exactly the same
samples from both. The dataset name contains a hash of everything that determines the dataset: the content of the files,
the tokenizer (see `identity`), and the options for reading documents. If several processes share a folder, one process
tokenizes while the other processes wait. The file made_from.json in the folder of the tokens describes the inputs from
which the tokens were computed, and contains checksums. If the tokens have changed, the files are tokenized again.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.index_cache import content_hash, folder_lock
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder, best_dtype
from megatron.extensions.data.text_data.encoding import CHUNK_BYTES, Encoded, Job, encode_all
from megatron.extensions.data.text_data.flags import TextDataConfig
from megatron.extensions.data.text_data.formats import Chunk, Reading, read_chunks
from megatron.extensions.data.text_data.identity import (
    Digests,
    damage_of,
    describe_tokens,
    identity_of,
    left_out,
    state_of,
)
from megatron.extensions.data.text_data.inputs import TextFile, find_inputs

logger = logging.getLogger(__name__)
# Warnings are logged on every rank, because any rank may tokenize.
logger.setLevel(logging.WARNING)

REPORT_EVERY = 10.0
"""Seconds between progress messages during tokenization."""

SHOWN_BAD = 5
"""Number of unreadable records that an error message lists."""


@dataclass(frozen=True)
class Source:
    """Text files to tokenize, together with a description of everything that determines the token ids."""

    files: Sequence[TextFile]
    states: dict[str, list[int]]
    """Maps the path of each local file to the state (such as the modification time) that the file had when its digest
    was computed."""

    digests: dict[str, str]
    """Mapping from the path of each file to its digest."""

    described: dict[str, object]
    """Everything that determines the tokens. A hash of this dict is part of the dataset name, and the dict is saved in
    the file `DESCRIPTION`."""

    @classmethod
    def of(cls, files: Sequence[TextFile], folder: Path, job: Job) -> Source:
        """Create the source for text files. `folder` stores the digests of files."""
        states = {file.path: state_of(file.path) for file in files if not file.remote}
        digests = Digests(folder).of(files)
        described = {
            "files": [[digests[file.path], file.format, file.compression] for file in files],
            "tokenizer": identity_of(job.tokenizer, job.vocab_size),
            "reading": asdict(job.reading),
            "append_eod": job.append_eod,
        }
        return cls(files, states, digests, described)

    def dtype(self, job: Job) -> np.dtype:
        """Return the dtype of token ids in the dataset, which depends on the size of the tokenizer's vocabulary."""
        return best_dtype(build_tokenizer(job.tokenizer, job.vocab_size).vocab_size)

    def encoded(self, job: Job, workers: int) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield the token ids of all documents, in order, chunk by chunk."""
        return encode_all(job, read_chunks(self.files, job.reading, CHUNK_BYTES), workers)

    def check_unchanged(self) -> None:
        """Raise ValueError if a file has changed since its digest was computed."""
        for path, state in self.states.items():
            if not os.path.exists(path) or state_of(path) != state:
                raise ValueError(f"{path} changed while it was tokenized; start again when it is complete")


@dataclass(frozen=True)
class TextData:
    """Converter of text files to the tokenized datasets of this run."""

    data: DatasetConfig
    tokenizer: TokenizerConfig
    vocab_size: int | None
    prepare: Callable[[], object]
    """Function that each worker process calls first; see `Job.prepare`."""

    @property
    def options(self) -> TextDataConfig:
        return self.data.options(TextDataConfig)

    def prefix(self, flag: str, value: str) -> str:
        """Return the path prefix of the indexed dataset that contains the tokens of the text files at `value`. If this
        dataset does not exist, it is created by tokenizing the files.

        Raises ValueError if files are missing or damaged, or if they contain more than --max-bad-lines bad records."""
        files = find_inputs([value], flag)
        reading = Reading((self.options.key_of(value),), self.options.text_documents, "--text-key")
        job = Job(self.tokenizer, self.vocab_size, reading, self.options.append_eod, self.prepare)
        return self.made(flag, value, job, lambda folder: Source.of(files, folder, job))

    def made(self, flag: str, value: str, job: Job, source_of: Callable[[Path], Source]) -> str:
        """Return the path prefix of the dataset that contains the tokens of a source. Create the dataset if it does not
        exist.

        Args:
            flag: Name of the flag to which the user passed `value`, for error messages.
            value: Path or URL of the data.
            job: Tokenization settings.
            source_of: Function that returns the source. The argument of the function is a folder in which it may store
                digests of files.
        """
        folder = self._folder(flag, value)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            source = source_of(folder)
            name = Path((value.partition("?")[0] if "://" in value else value).rstrip("/")).name
            target = folder / f"{name.partition('.')[0]}-{content_hash(source.described)}"
            if not _intact(target):
                with folder_lock(folder):
                    # Another process may have created the dataset before this process acquired the lock.
                    if not _intact(target):
                        self._tokenize(job, source, target)
            # The bad records of an existing dataset are also checked, because an earlier run may have used a larger
            # --max-bad-lines.
            self._check_bad(left_out(target))
        except OSError as error:
            rule = f"its tokens cannot be written to {folder} ({error})"
            raise ValueError(
                f"{flag} {value}: {rule}; choose a different folder with --data-cache-path FOLDER"
            ) from None
        return str(target / "text_document")

    def _folder(self, flag: str, value: str) -> Path:
        if self.data.data_cache_path is not None:
            return Path(self.data.data_cache_path) / "tokenized"
        if "://" in value:
            raise ValueError(f"{flag} {value}: tokens of remote files need a folder; add --data-cache-path FOLDER")
        return Path(value.rstrip("/")).parent / "cache" / "tokenized"

    def _tokenize(self, job: Job, source: Source, target: Path) -> None:
        files = source.files
        total = sum(file.size for file in files)
        done = 0
        began = time.monotonic()
        logger.warning("tokenizing %d files, %.1f MB, into %s", len(files), total / 1e6, target)
        temporary = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.tmp")
        damaged = temporary.with_suffix(".damaged")
        bad: list[str] = []
        try:
            with IndexedDatasetBuilder(str(temporary / "text_document"), source.dtype(job)) as builder:
                reported = began
                for chunk, encoded in source.encoded(job, self._workers(total)):
                    builder.add_documents(encoded.tokens[0], encoded.lengths[0])
                    bad += (f"{chunk.path}:{number}: {reason}" for number, reason in encoded.bad)
                    done += chunk.size
                    if time.monotonic() > reported + REPORT_EVERY:
                        reported = time.monotonic()
                        logger.warning("tokenized %.1f MB, %.2f MB/s", done / 1e6, done / 1e6 / (reported - began))
                self._check_bad(bad)
                if not builder.num_tokens:
                    more = " ..." if len(files) > 1 else ""
                    raise ValueError(f"{files[0].path}{more}: there is no document with text")
            source.check_unchanged()
            describe_tokens(temporary, source.described, files, source.digests, bad)
            if target.exists() and not _intact(target):
                os.replace(target, damaged)
            # On a file system without working locks, another process may have created the target in the meantime.
            if not target.exists():
                os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(damaged, ignore_errors=True)
        seconds = time.monotonic() - began
        logger.warning(
            "tokenized %d documents, %d tokens in %.1f s: %.0f tokens/s",
            *(builder.num_documents, builder.num_tokens, seconds, builder.num_tokens / seconds),
        )

    def _check_bad(self, bad: Sequence[str]) -> None:
        if len(bad) > self.options.max_bad_lines:
            shown = "\n".join(bad[:SHOWN_BAD]) + ("\n..." if len(bad) > SHOWN_BAD else "")
            raise ValueError(
                f"{len(bad)} records cannot be read, but --max-bad-lines allows {self.options.max_bad_lines}; repair "
                f"the files, or raise --max-bad-lines to leave them out:\n{shown}"
            )

    def _workers(self, size: int) -> int:
        """Return the number of processes that tokenize. If --tokenizer-workers is set, return its value. Otherwise,
        return 1 for small inputs and the number of cores for large inputs."""
        if self.options.tokenizer_workers is not None:
            return self.options.tokenizer_workers
        return 1 if size < 1 << 23 else min(64, len(os.sched_getaffinity(0)))


def _intact(target: Path) -> bool:
    """Return True if a folder contains tokens and the tokens have not changed since they were written. Log a warning if
    the tokens have changed."""
    if not target.exists():
        return False
    if wrong := damage_of(target):
        _say_damaged(wrong)
    return wrong is None


@cache
def _say_damaged(wrong: str) -> None:
    logger.warning("%s; tokenizing again", wrong)
