"""Tokenize text files into indexed datasets.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8

The tool writes data/corpus_text_document.bin and data/corpus_text_document.idx. With several --json-keys, it writes two
files for each key. Inputs are files, globs, folders and URLs such as s3://bucket/folder: .jsonl, .json (lines or an
array), .txt, .csv, .tsv, .parquet and .arrow. Text formats may be compressed (.gz, .bz2, .xz, .zst). Files with any
other suffix are read as JSON lines. Documents keep their order for any number of workers. Memory use depends on the
longest document, not on the size of the input. The output files get their final names only when they are complete.
Existing output files are an error unless --overwrite is set. The prefix may be a URL, such as s3://bucket/corpus.
PREFIX_KEY_document.sums.json contains the checksums that tools/inspect_dataset.py verifies.

To use eight machines, run this program with --shard 1/8 on the first, --shard 2/8 on the second, and so on. All other
flags must be the same, and all machines must be able to write to the prefix. The last machine to finish joins the
shards into the dataset that a single machine would have written, and deletes the shards. Uncompressed JSON lines files
are divided among the machines. Files in other formats are not divided, so provide several of these files per machine.

A line or row is bad if it is not valid UTF-8 or JSON, if a key is missing, or if a value is not text. Bad lines are
skipped and reported with their file and line number. All other documents are written, but the exit code is 1 if there
are more bad lines than --max-bad-lines. A file that cannot be read to its end is an error, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

import numpy as np
from tqdm import tqdm

from megatron.core.config.data import TokenizerConfig
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder, best_dtype
from megatron.extensions.data.text_data.encoding import CHUNK_BYTES, Encoded, Job, encode_all, peak_memory
from megatron.extensions.data.text_data.fast_tokenizer import DifferentIds, stand_in_for
from megatron.extensions.data.text_data.formats import Chunk, Reading, read_chunks
from megatron.extensions.data.text_data.identity import identity_of
from megatron.extensions.data.text_data.inputs import TextFile, find_inputs
from megatron.extensions.data.tokenizers.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.training.extensions import load_extensions

from .common import (
    TOKENIZER_FIELDS,
    add_config_flags,
    add_extension_flag,
    config_of,
    refuse,
    refuse_output,
    run_tool,
    too_small,
    tool_parser,
)
from .common.shards import Shard, chunks_of_shard, corpus_digest, join_shards, missing_shards, of_shard

REPORTED_BAD_LINES = 100


@dataclass
class Summary:
    """Numbers of documents, tokens and bad lines, with other figures of a preprocessing run."""

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
    """Number of characters for which the token ids of gigatoken were compared with those of Hugging Face tokenizers."""

    @property
    def num_bad(self) -> int:
        return sum(self.bad_lines.values())

    @property
    def documents_per_second(self) -> float:
        return self.documents / max(self.seconds, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return self.input_bytes / 1e6 / max(self.seconds, 1e-9)

    @property
    def rates(self) -> str:
        return f"{self.documents_per_second:,.0f} documents/s, {self.megabytes_per_second:.2f} MB/s"

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Add the counts of a chunk of documents to this summary, and report the bad lines of the chunk."""
        for number, reason in encoded.bad:
            if self.num_bad < REPORTED_BAD_LINES:
                print(f"{chunk.path}:{number}: {reason}; {chunk.unit} left out", file=sys.stderr)
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
            f"time {self.seconds:.1f} s: {self.rates}, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
            f"peak memory {self.main_peak_memory / 1e6:.0f} MB in the main process, "
            f"{self.worker_peak_memory / 1e6:.0f} MB in a worker",
            f"empty documents {self.empty_documents:,}, blank lines {self.blank_lines:,}, bad lines {self.num_bad:,}",
        ]
        if self.compared:
            lines.append(f"by gigatoken; ids of {self.compared:,} characters compared with those of tokenizers: equal")
        lines += [f"  {path}: {count:,} bad lines" for path, count in self.bad_lines.items()]
        return "\n".join(lines)


class Progress:
    """Progress display with documents/s and MB/s: a bar on a terminal; otherwise, a line every `interval` documents."""

    def __init__(self, inputs: Sequence[TextFile], interval: int) -> None:
        self.sizes = {file.path: file.size for file in inputs}
        self.interval = interval
        self.shown = 0
        self.start = time.monotonic()
        self.done: dict[str, int] = {}
        self.bar = tqdm(total=sum(self.sizes.values()), unit="B", unit_scale=True, disable=None)

    def update(self, chunk: Chunk, summary: Summary) -> None:
        summary.seconds = time.monotonic() - self.start
        self.done[chunk.path] = chunk.consumed
        self.bar.set_postfix_str(f"{summary.documents_per_second:.0f} documents/s", refresh=False)
        self.bar.update(sum(self.done.values()) - self.bar.n)
        if self.bar.disable and summary.documents // self.interval > self.shown:
            self.shown = summary.documents // self.interval
            share = 100 * sum(self.done.values()) / max(1, sum(self.sizes.values()))
            said = f"{summary.documents:,} documents ({share:.0f} % of the input), {summary.rates}"
            print(said, file=sys.stderr, flush=True)


def preprocess(
    job: Job, tokenizer: Tokenizer, inputs: Sequence[TextFile], prefixes: Sequence[str], args: argparse.Namespace
) -> Summary:
    """Write one dataset for each key, for the whole corpus or for a shard. If no document could be read, leave no files
    and raise ValueError, except for a shard, which may be empty."""
    summary, shard = Summary(), args.shard
    progress = Progress(inputs if shard is None else [file for file, _ in of_shard(inputs, shard)], args.log_interval)
    with ExitStack() as stack:
        stack.callback(progress.bar.close)
        dtype = best_dtype(tokenizer.vocab_size)
        described, chunks = dict[str, object](), read_chunks(inputs, job.reading, CHUNK_BYTES)
        if shard is not None:
            prefixes = [shard.prefix(prefix) for prefix in prefixes]
            described = {"corpus": corpus_of(job, inputs)}
            chunks = chunks_of_shard(inputs, job.reading, CHUNK_BYTES, shard)
        builders = [stack.enter_context(IndexedDatasetBuilder(prefix, dtype, described)) for prefix in prefixes]
        for chunk, encoded in encode_all(job, chunks, args.workers):
            for builder, tokens, lengths in zip(builders, encoded.tokens, encoded.lengths, strict=True):
                builder.add_documents(tokens, lengths)
            summary.add(chunk, encoded)
            progress.update(chunk, summary)
        if not summary.tokens and shard is None:
            more = f" and {len(inputs) - 1} further files" if len(inputs) > 1 else ""
            raise ValueError(
                f"--input: no document with text in {inputs[0].path}{more} ({summary.num_bad} bad lines, "
                f"{summary.empty_documents} empty documents, {summary.blank_lines} blank lines): nothing written"
            )
    summary.seconds = time.monotonic() - progress.start
    summary.main_peak_memory = peak_memory()
    return summary


def corpus_of(job: Job, inputs: Sequence[TextFile]) -> str:
    """Return a digest of the inputs and options that must be the same for all shards of a corpus."""
    return corpus_digest(inputs, (identity_of(job.tokenizer, job.vocab_size), asdict(job.reading), job.append_eod))


def join(job: Job, inputs: Sequence[TextFile], args: argparse.Namespace, dtype: np.dtype) -> None:
    """Join the shards if all are complete; otherwise, report the incomplete shards."""
    for prefix in prefixes_of(args):
        if missing := missing_shards(prefix, args.shard, corpus_of(job, inputs)):
            count = f"{len(missing)} of {args.shard.count} shards"
            print(f"{prefix}: written by the last shard to finish; {count} are not complete: {missing[:20]}")
        elif join_shards(prefix, args.shard, dtype):
            print(f"{prefix}: joined of {args.shard.count} shards")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__, allow_abbrev=False)
    add_extension_flag(parser, argv)
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, help="files, globs, folders or URLs")
    group.add_argument(
        *("--json-keys", "--text-key"),
        nargs="+",
        default=["text"],
        help="keys or columns to tokenize, each into its own dataset",
    )
    group.add_argument(
        "--text-documents",
        choices=("file", "line"),
        default="file",
        help="unit of a document in a plain text file (default: file)",
    )
    group.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    group.add_argument(
        "--shard", help="NUMBER/COUNT: tokenize this part of the input; the process that finishes last joins all parts"
    )
    group.add_argument("--overwrite", action="store_true", help="replace output files that exist")
    group.add_argument("--append-eod", action="store_true", help="end each document with the EOD token")
    group.add_argument("--max-bad-lines", type=int, default=0, help="exit with an error if more lines are bad")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    group.add_argument(
        "--bpe-backend",
        choices=("auto", "gigatoken", "tokenizers"),
        default="auto",
        help="encoder of HuggingFaceTokenizer and GPT2BPETokenizer: gigatoken (pip install gigatoken) is many "
        "times faster, and its ids are compared with those of tokenizers on a share of the documents; auto uses it "
        "if it is installed and its ids are equal (default)",
    )
    group.add_argument(
        "--log-interval", type=int, default=1000, help="documents between log lines if the output is not a terminal"
    )
    group.add_argument("--summary-file", help="also write the summary as JSON")
    add_config_flags(parser, "tokenizer", *TOKENIZER_FIELDS, "vocab_size")
    other = parser.add_argument_group("Megatron-LM flags that have no effect here; each is accepted with a notice")
    for flag, reason in MEANINGLESS.items():
        takes_value = flag not in ("--keep-sequential-samples", "--keep-newlines")
        extra: dict[str, object] = {"metavar": "VALUE"} if takes_value else {"action": "store_true"}
        other.add_argument(flag, help=reason, **extra)  # type: ignore[arg-type]
    parser.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for flag, reason in MEANINGLESS.items():
        if getattr(args, flag[2:].replace("-", "_")):
            print(f"{flag} has no effect here: {reason}", file=sys.stderr)
    return args


MEANINGLESS = {
    "--partitions": "memory use does not depend on the size of the input, so the input is not partitioned",
    "--keep-sequential-samples": "documents always keep their order",
    "--keep-newlines": "documents are not split into sentences, and keep all their newlines",
    "--lang": "documents are not split into sentences",
    "--dataset-impl": "there is one kind of indexed dataset, mmap",
}


def check(args: argparse.Namespace) -> list[TextFile]:
    """Check all flags, and return the input files. Raises ValueError with one line for each problem."""
    args.shard = args.shard and Shard.of_text(args.shard)
    problems, inputs = too_small(args, workers=1, log_interval=1, max_bad_lines=0), list[TextFile]()
    if args.split_sentences:
        problems.append("--split-sentences is not implemented: GPT training uses whole documents; leave it out")
    if len(set(args.json_keys)) < len(args.json_keys):
        problems.append(f"--json-keys {' '.join(args.json_keys)}: a key is given twice")
    checks: list[Callable[[], object]] = [
        lambda: inputs.extend(find_inputs(args.input)),
        lambda: refuse_output(outputs(args), args.overwrite),
        lambda: build_tokenizer(config_of(TokenizerConfig, args), args.vocab_size),
    ]
    for part in checks:
        try:
            part()
        except ValueError as error:
            problems.append(str(error))
    refuse(problems)
    return inputs


def wants_stand_in(backend: str, tokenizer: Tokenizer) -> bool:
    """Return True if gigatoken should tokenize the data. Raises ValueError if --bpe-backend is gigatoken, but gigatoken
    cannot be used."""
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


def outputs(args: argparse.Namespace) -> list[PurePath]:
    prefixes = [prefix if args.shard is None else args.shard.prefix(prefix) for prefix in prefixes_of(args)]
    return [located(prefix + suffix) for prefix in prefixes for suffix in (".bin", ".idx")]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    inputs = check(args)
    reading, prepare = Reading(tuple(args.json_keys), args.text_documents), partial(load_extensions, args.extension)
    job = Job(config_of(TokenizerConfig, args), args.vocab_size, reading, args.append_eod, prepare)
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    if job.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: this {args.tokenizer_type} has no end-of-document token; use another tokenizer"
        )
    job = replace(job, stand_in=wants_stand_in(args.bpe_backend, tokenizer))
    rest = (tokenizer, inputs, prefixes_of(args), args)
    try:
        summary = preprocess(job, *rest)
    except DifferentIds as error:
        if args.bpe_backend == "gigatoken":
            raise ValueError(f"--bpe-backend gigatoken: {error}; nothing is written; use tokenizers") from None
        print(f"{error}: starting again with tokenizers", file=sys.stderr)
        summary = preprocess(replace(job, stand_in=False), *rest)
    for path in outputs(args):
        print(f"{path}: {storage_of(path).size(path):,} bytes")
    print(summary.text())
    if args.shard is not None:
        join(job, inputs, args, best_dtype(tokenizer.vocab_size))
    if args.summary_file:
        rates = {"documents_per_second": summary.documents_per_second, "mb_per_second": summary.megabytes_per_second}
        Path(args.summary_file).write_text(json.dumps(asdict(summary) | rates, indent=1) + "\n")
    if summary.num_bad > args.max_bad_lines:
        allowed = f"--max-bad-lines allows for {args.max_bad_lines}; all other documents are in the output"
        print(f"error: {summary.num_bad} bad lines, {allowed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
