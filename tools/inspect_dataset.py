"""Describe and verify indexed datasets, and export the samples that training would draw from them.

    python tools/inspect_dataset.py data/corpus_text_document
    python tools/inspect_dataset.py data/corpus_text_document --show 3 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
    python tools/inspect_dataset.py --data-path data/corpus_text_document --split 90,5,5 --seq-length 1024 \\
        --train-samples 1000 --dump samples.npz

    python tools/inspect_dataset.py corpus.jsonl --document 17 --tokenizer-type ByteTokenizer
    python tools/inspect_dataset.py --sample-log samples.jsonl --step 18 --data-path 0.7 a.jsonl 0.3 b.jsonl \\
        --tokenizer-type ByteTokenizer

Text files are tokenized as in a run. --sample-log shows the samples of a step. Pass the same data flags as in the run,
including --data-phases if the run has several data phases. The exit code is 1 if a dataset is inconsistent. With
--dump, the data flags have the same meaning as in training. The written file has an array [samples, seq_length + 1] of
token ids for each split that exists: `train`, `valid` and `test`. The arrays `train_len`, `valid_len` and `test_len`
contain the numbers of samples in the splits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.build import build_datasets, parse_blend, split_share
from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.indexed_dataset import BLOCK, IndexedDataset
from megatron.core.datasets.indices import parse_split
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, data_kind_of, refusal
from megatron.core.fsync import whole_file
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.extensions.data.datasets.indexed_writer import SUMS, damages_of
from megatron.training.config.flags import field_table
from megatron.training.extensions import load_extensions
from megatron.training.metrics.data_sources import SourceNames

from .common import TOKENIZER_FIELDS, add_config_flags, add_extension_flag, config_of, dataset_at, run_tool, tool_parser
from .common.sample_log import WITHOUT_DOCUMENTS, lines_of_step, record_of_step

SPLITS = ("train", "valid", "test")
DATA_FIELDS = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "split",
    "data_cache_path",
    "seed",
    "seq_length",
)


def describe(dataset: IndexedDataset, eod: int | None) -> Iterator[str]:
    """Yield lines of text that describe a dataset, such as its sizes and sequence lengths. This function reads the
    whole dataset."""
    lengths = dataset.lengths
    yield f"{dataset.prefix}: {dataset.dtype.name}, {dataset.num_tokens * dataset.dtype.itemsize:,} bytes of tokens"
    yield f"  documents {dataset.num_documents:,}, sequences {len(dataset):,}, tokens {dataset.num_tokens:,}"
    if not len(dataset):
        return
    yield (
        f"  tokens in a sequence: {lengths.min():,} to {lengths.max():,}, "
        f"mean {dataset.num_tokens / len(dataset):,.1f}, median {np.median(lengths):,.0f}"
    )
    empty = int((np.diff(dataset.document_boundaries) == 0).sum())
    yield f"  documents without tokens: {empty:,}"
    if dataset.num_tokens:
        low, high = token_range(dataset)
        yield f"  token ids: {low} to {high}"
    if eod is not None:
        yield f"  sequences that do not end with EOD ({eod}): {count_without_end(dataset, eod):,}"


def token_blocks(dataset: IndexedDataset) -> Iterator[tuple[int, NDArray]]:
    """Read the dataset in blocks. Yield the position of each block's first token, and the block's tokens."""
    for start in range(0, dataset.num_tokens, BLOCK):
        yield start, dataset.read(start, min(BLOCK, dataset.num_tokens - start))


def token_range(dataset: IndexedDataset) -> tuple[int, int]:
    ranges = [(int(block.min()), int(block.max())) for _, block in token_blocks(dataset)]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def count_without_end(dataset: IndexedDataset, eod: int) -> int:
    ends = np.cumsum(dataset.lengths, dtype=np.int64)
    lasts = (ends - 1)[dataset.lengths > 0]
    found = len(ends) - len(lasts)
    for start, block in token_blocks(dataset):
        first, stop = np.searchsorted(lasts, (start, start + len(block)))
        found += int((block[lasts[first:stop] - start] != eod).sum())
    return found


def show(dataset: IndexedDataset, count: int, length: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield lines with the first `length` tokens of each of the first `count` sequences. With a tokenizer, also yield
    the decoded text."""
    for number in range(min(count, len(dataset))):
        ids = dataset.get(number, 0, min(length, int(dataset.lengths[number]))).tolist()
        yield f"  sequence {number}, {int(dataset.lengths[number]):,} tokens: {ids}"
        if tokenizer is not None:
            yield f"    {tokenizer.detokenize(ids)!r}"


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield lines with all tokens of a document. With a tokenizer, also yield the decoded text. Raises ValueError if
    the dataset has no document `number`."""
    if not 0 <= number < dataset.num_documents:
        raise ValueError(
            f"--document {number}: {dataset.prefix} has documents 0 to {dataset.num_documents - 1}; choose one of them"
        )
    first, last = map(int, dataset.document_boundaries[number : number + 2])
    ids = np.concatenate([dataset.get(sequence) for sequence in range(first, last)] or [np.empty(0, np.int64)])
    yield f"  document {number}, {len(ids):,} tokens"
    yield f"    {ids.tolist() if tokenizer is None else repr(tokenizer.detokenize(ids.tolist()))}"


def prefix_of(path: str, args: argparse.Namespace) -> str:
    """Return the prefix of the indexed dataset for a path. If the path is a text file, tokenize the text unless a run
    has already done so, and return the prefix of the tokenized dataset. For all other paths, return the path
    unchanged."""
    kind = data_kind_of(path)
    if kind is None:
        return path
    if not args.tokenizer_type:
        raise ValueError(refusal(path, "give the prefix of an indexed dataset, or add the tokenizer of the text"))
    from megatron.extensions.data.text_data.flags import TextDataConfig

    options = replace(config_of(TextDataConfig, args), append_eod=not args.no_append_eod)
    data = config_of(DatasetConfig, args).with_options(options)
    prepare = partial(load_extensions, args.extension)
    return kind.reader(data, config_of(TokenizerConfig, args), args.vocab_size, prepare).prefix("", path)


def show_step(args: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    """Print the samples of a training step."""
    if args.step is None:
        raise ValueError("--sample-log needs --step, the iteration to show")
    record = record_of_step(Path(args.sample_log), args.step)
    config, sources = config_of(DatasetConfig, args), SourceNames()
    configs = [each for each in data_of_phases(args, config) if each.data_path or each.train_data_path]
    if not configs:
        if not any(record.get("documents") or [True]):
            raise ValueError(WITHOUT_DOCUMENTS)
        raise ValueError("--sample-log needs the data flags of the run, such as --data-path PREFIX")
    for each in configs:
        sources.numbers(each, "train")
    paths = {name: split_share(path)[0] for name, path in zip(sources.names, sources.paths, strict=True)}
    prefixes = {name: prefix_of(path, args) for name, path in paths.items()}
    decode = None if tokenizer is None else lambda ids: tokenizer.detokenize(ids.tolist())
    for line in lines_of_step(record, prefixes, decode):
        print(line)


def data_of_phases(args: argparse.Namespace, config: DatasetConfig) -> list[DatasetConfig]:
    """Return the data configuration that the flags select, followed by the configuration of each phase in --data-phases
    that uses other data. Raises ValueError if the --data-phases file is invalid."""
    path = getattr(args, "data_phases", None)
    if path is None:
        return [config]
    from megatron.extensions.data.phases.phase_file import read_phases

    phases, problems = read_phases(path)
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    changed = (phase.value("data_path") for phase in phases)
    return [config, *(replace(config, data_path=words) for words in changed if words)]


def inspect(prefixes: Sequence[str], args: argparse.Namespace, tokenizer: Tokenizer | None) -> int:
    """Print a description of each dataset, and return the number of inconsistencies found."""
    eod = tokenizer.eod if tokenizer is not None and args.eod is None else args.eod
    found = 0
    for prefix in prefixes:
        dataset = dataset_at(prefix_of(prefix, args))
        damages = damages_of(dataset.prefix)
        problems = dataset.verify() + (damages or [])
        if problems:
            print(f"{prefix}: damaged")
        else:
            for line in (*describe(dataset, eod), *show(dataset, args.show, args.show_tokens, tokenizer)):
                print(line)
            if damages is not None:
                print(f"  checksums: those of {dataset.prefix}{SUMS}")
            for number in args.document or ():
                for line in show_document(dataset, number, tokenizer):
                    print(line)
        if tokenizer is not None and not problems and dataset.num_tokens:
            high = token_range(dataset)[1]
            if high >= tokenizer.vocab_size:
                problems.append(f"token id {high} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}")
        for problem in problems:
            print(f"error: {prefix}: {problem}", file=sys.stderr)
        found += len(problems)
    return found


def dump(args: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    """Write every sample of every split to `--dump`."""
    if getattr(args, "data_phases", None) is not None:
        rule = "the beginning of a phase depends on the length of the run"
        raise ValueError(f"--dump with --data-phases: {rule}; pass the data of one phase with --data-path")
    if not args.seq_length:
        raise ValueError("--dump needs --seq-length, the number of tokens in a sample")
    config = config_of(DatasetConfig, args)
    datasets = build_datasets(
        config,
        seq_length=args.seq_length,
        seed=args.seed,
        sizes=sizes(args, config),
        vocab_size=tokenizer.vocab_size if tokenizer else None,
    )
    arrays: dict[str, NDArray] = {}
    for split, dataset in datasets._asdict().items():
        if dataset is not None:
            arrays[split] = samples(dataset, args.seq_length)
            arrays[f"{split}_len"] = np.array(len(dataset))
            print(f"{split}: {len(dataset):,} samples of {args.seq_length} tokens, fingerprint {dataset.fingerprint}")
    with whole_file(Path(args.dump)) as file, open(file, "wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    print(f"{args.dump}: {', '.join(arrays)}")


def sizes(args: argparse.Namespace, config: DatasetConfig) -> tuple[int | None, int | None, int | None]:
    """Return the number of samples requested for each split. Raises ValueError if a split is a weighted blend, but its
    number of samples is not given."""
    found = (args.train_samples, args.valid_samples, args.test_samples)
    shares = parse_split(config.split)
    for number, split in enumerate(SPLITS):
        flag, values = "--data-path", config.data_path if shares[number] else None
        if config.per_split:
            flag, values = f"--{split}-data-path", getattr(config, f"{split}_data_path")
        blend = parse_blend(flag, values) if values else None
        weighted = blend is not None and blend.weights and not (config.per_split and len(blend.prefixes) == 1)
        if weighted and found[number] is None:
            raise ValueError(f"{flag} has weights, and a weighted blend has no epoch: give --{split}-samples N")
    return found


def samples(dataset: Dataset, seq_length: int) -> NDArray[np.int32]:
    array = np.empty((len(dataset), seq_length + 1), np.int32)
    for number in range(len(dataset)):
        array[number] = dataset.text(number)
    return array


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__, allow_abbrev=False)
    add_extension_flag(parser, argv)
    parser.add_argument("prefix", nargs="*", help="datasets to describe and verify")
    parser.add_argument("--show", type=int, default=0, help="number of sequences to show")
    parser.add_argument("--show-tokens", type=int, default=64, help="tokens to show per sequence")
    parser.add_argument(
        "--document", type=int, nargs="+", metavar="N", help="documents to show in full, counted from 0"
    )
    parser.add_argument("--sample-log", metavar="FILE", help="file of a run's --sample-log")
    parser.add_argument("--step", type=int, metavar="N", help="iteration of --sample-log to show")
    parser.add_argument("--eod", type=int, help="id of the EOD token, needed if no tokenizer is given")
    parser.add_argument("--dump", metavar="FILE.npz", help="write the samples that the data flags select")
    for split in SPLITS:
        parser.add_argument(f"--{split}-samples", type=int, help=f"{split} samples to request (default: one epoch)")
    add_config_flags(parser, "data, as in training", *DATA_FIELDS)
    add_config_flags(parser, "tokenizer", *TOKENIZER_FIELDS, "vocab_size")
    if "data_phases" in field_table():
        add_config_flags(parser, "phases, as in training", "data_phases")
    if "text" in PATH_KINDS:
        add_config_flags(parser, "text files, as in training", "text_key", "text_documents", "max_bad_lines")
        parser.add_argument("--no-append-eod", action="store_true", help="documents of text files do not end with EOD")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    config = config_of(DatasetConfig, args)
    named = [(f"--{name.replace('_', '-')}", getattr(config, name)) for name in DATA_FIELDS[:4]]
    from_flags = [
        split_share(prefix)[0] for flag, values in named if values for prefix in parse_blend(flag, values).prefixes
    ]
    if not args.prefix and not from_flags and not args.sample_log:
        raise ValueError("no dataset: give prefixes, or --data-path")
    if args.dump and not from_flags:
        raise ValueError("--dump needs data flags, such as --data-path PREFIX")
    tokenizer = None
    if args.tokenizer_type:
        tokenizer = build_tokenizer(config_of(TokenizerConfig, args), args.vocab_size)
    if args.sample_log:
        show_step(args, tokenizer)
        return 0
    problems = inspect(list(dict.fromkeys([*args.prefix, *from_flags])), args, tokenizer)
    if args.dump and not problems:
        dump(args, tokenizer)
    return 1 if problems else 0


if __name__ == "__main__":
    run_tool(main)
