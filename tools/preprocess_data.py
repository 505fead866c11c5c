"""Tokenize JSON lines into indexed datasets.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8

Writes data/corpus_text_document.bin and .idx, and the same for each of --json-keys. Inputs are files and globs, plain,
.gz or .zst. Documents keep their order for any number of workers. Memory use depends on the longest document, not
on the size of the input. The output gets its name when it is complete. It replaces existing files only with
--overwrite.

A bad line (not UTF-8, not JSON, a missing key, not text) is reported with file and line number and skipped. The other
documents are written, but the exit code is 1 if there are more bad lines than --max-bad-lines.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.config.data import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.core.tokenizers.fast import DifferentIds, stand_in_for
from megatron.core.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.training.extensions import load_extensions

from .common import (
    TOKENIZER_FIELDS,
    add_config_flags,
    add_extension_flag,
    config_of,
    refuse_existing,
    refuse_unwritable,
    run_tool,
)
from .jsonl import Chunk, find_inputs, parse_line, read_chunks

CHUNK_BYTES = 1 << 18
CHUNKS_IN_FLIGHT = 3  # for each worker
REPORTED_BAD_LINES = 100


@dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    tokenizer: TokenizerConfig
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool
    extensions: tuple[str, ...] = ()
    stand_in: bool = False
    """Whether gigatoken does the work of tokenizers."""


@dataclass
class Encoded:
    """A chunk's documents: for each key their tokens back to back and their lengths."""

    tokens: list[NDArray]
    lengths: list[NDArray[np.int32]]
    bad: list[tuple[int, str]]
    blank: int
    peak_memory: int
    """Bytes of the process that made it, at most so far."""

    compared: int
    """Characters of it whose ids were compared with those of the tokenizer that was named."""


class Encoder:
    """Turns chunks into token ids."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
        self.stand_in = stand_in_for(self.tokenizer) if job.stand_in else None
        self.dtype = best_dtype(self.tokenizer.vocab_size)
        self.ending = [self.tokenizer.eod] if job.append_eod else []

    def __call__(self, chunk: Chunk) -> Encoded:
        parts: list[list[NDArray]] = [[] for _ in self.job.keys]
        bad, blank = [], 0
        compared = self.stand_in.compared if self.stand_in is not None else 0
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                blank += 1
                continue
            try:
                documents = [self._encode(text) for text in parse_line(line, self.job.keys)]
            except ValueError as error:
                bad.append((number, str(error)))
                continue
            for part, document in zip(parts, documents, strict=True):
                part.append(document)
        return Encoded(
            [np.concatenate(part) if part else np.empty(0, self.dtype) for part in parts],
            [np.array([len(document) for document in part], np.int32) for part in parts],
            bad,
            blank,
            peak_memory(),
            self.stand_in.compared - compared if self.stand_in is not None else 0,
        )

    def _encode(self, text: str) -> NDArray:
        tokenizer = self.stand_in or self.tokenizer
        try:
            ids = tokenizer.tokenize(text) if text else []
        except UnicodeEncodeError as error:
            raise ValueError(f"not Unicode text: {error.reason} at character {error.start}") from None
        # An empty document stays empty: a lone EOD is nothing to learn from.
        document = np.empty(len(ids) + len(self.ending) if len(ids) else 0, self.dtype)
        if len(ids):
            document[: len(ids)], document[len(ids) :] = ids, self.ending
        return document


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_encoder: Encoder | None = None


def _start_worker(job: Job) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load_extensions(job.extensions)
    _encoder = Encoder(job)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _encoder is not None
    return _encoder(chunk)


def encode_all(job: Job, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Encodes chunks side by side and yields them in their order, with a bounded number of them in memory."""
    if workers == 1:
        encoder = Encoder(job)
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    # Workers start afresh: a fork would copy whatever threads hold at that moment.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
    try:
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            pending.append((chunk, pool.submit(_encode_in_worker, chunk)))
            if len(pending) >= CHUNKS_IN_FLIGHT * workers:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise ValueError(
            f"a worker process was killed, most likely because memory ran out; use fewer than --workers {workers}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Summary:
    """What a run did."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    empty_documents: int = 0
    blank_lines: int = 0
    bad_lines: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    main_peak_memory: int = 0
    worker_peak_memory: int = 0
    compared: int = 0
    """Characters whose ids by gigatoken were compared with those of tokenizers."""

    @property
    def num_bad(self) -> int:
        return sum(self.bad_lines.values())

    @property
    def documents_per_second(self) -> float:
        return self.documents / max(self.seconds, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return self.input_bytes / 1e6 / max(self.seconds, 1e-9)

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Counts a chunk, and reports its bad lines."""
        for number, reason in encoded.bad:
            if self.num_bad < REPORTED_BAD_LINES:
                print(f"{chunk.path}:{number}: {reason}; line left out", file=sys.stderr)
            elif self.num_bad == REPORTED_BAD_LINES:
                print("further bad lines are counted, not shown", file=sys.stderr)
            self.bad_lines[chunk.path] = self.bad_lines.get(chunk.path, 0) + 1
        self.documents += len(encoded.lengths[0])
        self.tokens += sum(map(len, encoded.tokens))
        self.empty_documents += sum(int((lengths == 0).sum()) for lengths in encoded.lengths)
        self.blank_lines += encoded.blank
        self.input_bytes += chunk.size
        self.compared += encoded.compared
        self.worker_peak_memory = max(self.worker_peak_memory, encoded.peak_memory)

    def text(self) -> str:
        lines = [
            f"documents {self.documents:,}, tokens {self.tokens:,}, input {self.input_bytes / 1e6:,.1f} MB",
            f"time {self.seconds:.1f} s: {self.documents_per_second:,.0f} documents/s, "
            f"{self.megabytes_per_second:.2f} MB/s, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
            f"peak memory {self.main_peak_memory / 1e6:.0f} MB in the main process, "
            f"{self.worker_peak_memory / 1e6:.0f} MB in a worker",
            f"empty documents {self.empty_documents:,}, blank lines {self.blank_lines:,}, bad lines {self.num_bad:,}",
        ]
        if self.compared:
            lines.append(f"by gigatoken; ids of {self.compared:,} characters compared with those of tokenizers: equal")
        lines += [f"  {path}: {count:,} bad lines" for path, count in self.bad_lines.items()]
        return "\n".join(lines)


class Progress:
    """A bar on a terminal, else a line each `interval` documents. Both show documents/s and MB/s."""

    def __init__(self, inputs: Sequence[Path], interval: int) -> None:
        self.sizes = {str(path): path.stat().st_size for path in inputs}
        self.interval = interval
        self.shown = 0
        self.start = time.monotonic()
        self.done: dict[str, int] = {}
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=sum(self.sizes.values()), unit="B", unit_scale=True)

    def update(self, chunk: Chunk, summary: Summary) -> None:
        summary.seconds = time.monotonic() - self.start
        self.done[chunk.path] = chunk.consumed
        if self.bar is not None:
            self.bar.set_postfix_str(f"{summary.documents_per_second:.0f} documents/s", refresh=False)
            self.bar.update(sum(self.done.values()) - self.bar.n)
        elif summary.documents // self.interval > self.shown:
            self.shown = summary.documents // self.interval
            share = 100 * sum(self.done.values()) / max(1, sum(self.sizes.values()))
            print(
                f"{summary.documents:,} documents ({share:.0f} % of the input), "
                f"{summary.documents_per_second:,.0f} documents/s, {summary.megabytes_per_second:.2f} MB/s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def preprocess(
    job: Job, tokenizer: Tokenizer, inputs: Sequence[Path], prefixes: Sequence[str], workers: int, interval: int
) -> Summary:
    """Writes one dataset for each key. Raises ValueError if no document could be read; nothing is left then."""
    summary = Summary()
    progress = Progress(inputs, interval)
    with ExitStack() as stack:
        stack.callback(progress.close)
        dtype = best_dtype(tokenizer.vocab_size)
        builders = [stack.enter_context(IndexedDatasetBuilder(prefix, dtype)) for prefix in prefixes]
        for chunk, encoded in encode_all(job, read_chunks(inputs, CHUNK_BYTES), workers):
            for builder, tokens, lengths in zip(builders, encoded.tokens, encoded.lengths, strict=True):
                builder.add_documents(tokens, lengths)
            summary.add(chunk, encoded)
            progress.update(chunk, summary)
        if not summary.tokens:
            raise ValueError(
                f"--input: no document with text in {len(inputs)} files ({summary.num_bad} bad lines, "
                f"{summary.empty_documents} empty documents, {summary.blank_lines} blank lines): nothing written"
            )
    summary.seconds = time.monotonic() - progress.start
    summary.main_peak_memory = peak_memory()
    return summary


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_extension_flag(parser, argv)
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, help="JSONL files or globs; .gz and .zst are decompressed")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, a dataset each")
    group.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    group.add_argument("--overwrite", action="store_true", help="replace output files that exist")
    group.add_argument("--append-eod", action="store_true", help="end each document with the EOD token")
    group.add_argument("--max-bad-lines", type=int, default=0, help="bad lines that still give exit code 0")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    group.add_argument(
        "--bpe-backend",
        choices=("auto", "gigatoken", "tokenizers"),
        default="auto",
        help="what encodes for HuggingFaceTokenizer and GPT2BPETokenizer: gigatoken (pip install gigatoken) is many "
        "times faster, and its ids are compared with those of tokenizers on a share of the documents; auto takes it "
        "where it is installed and its ids are equal (default)",
    )
    group.add_argument("--log-interval", type=int, default=1000, help="documents between lines, off a terminal")
    group.add_argument("--summary-file", help="write the summary as JSON, too")
    add_config_flags(parser, "tokenizer", *TOKENIZER_FIELDS, "vocab_size")
    other = parser.add_argument_group("flags of Megatron-LM that have no meaning here; accepted with a line saying so")
    for flag, reason in MEANINGLESS.items():
        takes_value = flag not in ("--keep-sequential-samples", "--keep-newlines")
        extra: dict[str, object] = {"metavar": "VALUE"} if takes_value else {"action": "store_true"}
        other.add_argument(flag, help=reason, **extra)  # type: ignore[arg-type]
    parser.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for flag, reason in MEANINGLESS.items():
        if getattr(args, flag[2:].replace("-", "_")):
            print(f"{flag} has no meaning here: {reason}", file=sys.stderr)
    return args


MEANINGLESS = {
    "--partitions": "memory is flat whatever the input, so it is not cut into partitions",
    "--keep-sequential-samples": "documents always keep their order",
    "--keep-newlines": "documents are not split into sentences, and keep all their newlines",
    "--lang": "documents are not split into sentences",
    "--dataset-impl": "there is one kind of indexed dataset, mmap",
}


def check(args: argparse.Namespace) -> None:
    """Raises ValueError with every problem of the flags."""
    problems = []
    for name, least in (("workers", 1), ("log_interval", 1), ("max_bad_lines", 0)):
        if getattr(args, name) < least:
            problems.append(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.split_sentences:
        problems.append("--split-sentences is not built: GPT data take whole documents; leave it out")
    if len(set(args.json_keys)) < len(args.json_keys):
        problems.append(f"--json-keys {' '.join(args.json_keys)}: a key is given twice")
    checks: list[Callable[[], object]] = [
        lambda: find_inputs(args.input),
        lambda: refuse_existing(outputs(args), args.overwrite),
        lambda: refuse_unwritable(Path(args.output_prefix).parent),
        lambda: build_tokenizer(config_of(TokenizerConfig, args), args.vocab_size),
    ]
    for part in checks:
        try:
            part()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def wants_stand_in(backend: str, tokenizer: Tokenizer) -> bool:
    """Whether gigatoken is to do the work. Raises ValueError where it was asked for and cannot."""
    if backend == "tokenizers":
        return False
    try:
        stand_in_for(tokenizer)
    except DifferentIds as error:
        if backend == "gigatoken":
            raise ValueError(f"--bpe-backend gigatoken: {error}; use --bpe-backend tokenizers") from None
        if isinstance(tokenizer, HuggingFaceTokenizer | GPT2BPETokenizer):
            print(f"tokenizers encodes: {error}", file=sys.stderr)
        return False
    return True


def prefixes_of(args: argparse.Namespace) -> list[str]:
    return [f"{args.output_prefix}_{key}_document" for key in args.json_keys]


def outputs(args: argparse.Namespace) -> list[Path]:
    return [Path(prefix + suffix) for prefix in prefixes_of(args) for suffix in (".bin", ".idx")]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    check(args)
    extensions, keys = tuple(args.extension), tuple(args.json_keys)
    job = Job(config_of(TokenizerConfig, args), args.vocab_size, keys, args.append_eod, extensions)
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    if job.append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: this {args.tokenizer_type} has no end-of-document token; use one that has")
    job = replace(job, stand_in=wants_stand_in(args.bpe_backend, tokenizer))
    rest = (tokenizer, find_inputs(args.input), prefixes_of(args), args.workers, args.log_interval)
    try:
        summary = preprocess(job, *rest)
    except DifferentIds as error:
        if args.bpe_backend == "gigatoken":
            raise ValueError(f"--bpe-backend gigatoken: {error}; nothing is written; use tokenizers") from None
        print(f"{error}: starting again with tokenizers", file=sys.stderr)
        summary = preprocess(replace(job, stand_in=False), *rest)
    for path in outputs(args):
        print(f"{path}: {path.stat().st_size:,} bytes")
    print(summary.text())
    if args.summary_file:
        rates = {"documents_per_second": summary.documents_per_second, "mb_per_second": summary.megabytes_per_second}
        Path(args.summary_file).write_text(json.dumps(asdict(summary) | rates, indent=1) + "\n")
    if summary.num_bad > args.max_bad_lines:
        print(
            f"error: {summary.num_bad} bad lines, --max-bad-lines allows for {args.max_bad_lines}; "
            "all other documents are in the output",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
