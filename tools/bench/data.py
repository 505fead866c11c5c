"""Preprocessing, index building and loading of data, each beside what bounds it.

    python tools/bench/data.py                       # all three
    python tools/bench/data.py --part index --rounds 5

preprocess  tools/preprocess_data.py on about 50 MB of Python's source code, by SentencePiece and by byte-level
            BPE (through gigatoken where it is installed, and through tokenizers), 1 and 2 workers, beside the tokenizer
            alone on the same texts in memory, in as many processes.
index       Document, sample and shuffle indices of 2,000,000 documents of 600 tokens on average, sequences of 2048,
            over 1, 3 and 10 epochs, and blends of five data sets: cold (built and written) and warm (mapped).
load        Samples per second from the loader with the default number of workers.

Every figure is of a process of its own; what is compared takes turns.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tools.bench.side_by_side import Spread, bench_parser, machine, seconds_of, write_json
from tools.build_corpus import documents

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES, VOCAB = 50, 32000
DOCUMENTS, MEAN_TOKENS, SEQ = 2_000_000, 600, 2048
WEIGHTS = (0.35, 0.25, 0.2, 0.15, 0.05)


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    unit: str
    value: Spread
    peak_memory_mb: float | None = None
    beside: str = ""


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Result of `function` in a fresh process, and the most memory (MB) that the call added there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_with_peak, function, args).result()


def _with_peak(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = function(*args)
    return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


# Preprocessing

DOCUMENT_CHARACTERS = 100_000
"""Long texts are cut, as the memory of a tokenizer grows with the longest document."""


def write_corpus(path: Path, megabytes: float) -> None:
    """Writes about this many MB of Python's source code as JSON lines; repeats it if there is less."""
    size, library = 0, Path(sysconfig.get_paths()["stdlib"])
    with open(path, "w", encoding="utf-8") as out:
        for text in (document["text"] for document in cycle(documents(library, with_tests=True, min_chars=0))):
            for at in range(0, len(text), DOCUMENT_CHARACTERS):
                size += out.write(json.dumps({"text": text[at : at + DOCUMENT_CHARACTERS]}) + "\n")
            if size >= megabytes * 1e6:
                break


def train_tokenizers(folder: Path) -> dict[str, list[str]]:
    """Flags of a SentencePiece model and of a byte-level BPE, both trained on a smaller corpus."""
    from tokenizers import ByteLevelBPETokenizer

    small = folder / "small.jsonl"
    write_corpus(small, MEGABYTES / 10)
    command = [sys.executable, str(ROOT / "tools/train_tokenizer.py"), "--input", str(small), "--vocab-size", "8000"]
    subprocess.run([*command, "--output-prefix", str(folder / "own")], check=True, capture_output=True)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts_of(small), VOCAB, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    return {
        "SentencePiece": ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "own.model")],
        "BPE": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer.json")],
    }


def texts_of(corpus: Path) -> Iterator[str]:
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def bare(kind: str, folder: Path, corpus: Path, part: int, of: int) -> tuple[int, float]:
    """(tokens, seconds) of the tokenizer alone on every so-manieth text, all in memory before the clock starts."""
    texts = [text for number, text in enumerate(texts_of(corpus)) if number % of == part]
    encode: Callable[[str], Any]
    if kind == "SentencePiece":
        import sentencepiece

        encode = sentencepiece.SentencePieceProcessor(model_file=str(folder / "own.model")).encode
    elif kind == "BPE, gigatoken":
        import gigatoken

        encode = gigatoken.Tokenizer.from_json((folder / "tokenizer.json").read_text()).encode
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

        def encode(text: str) -> Any:
            return tokenizer.encode(text).ids

    start = time.perf_counter()
    tokens = sum(len(encode(text)) for text in texts)
    return tokens, time.perf_counter() - start


def bare_rate(kind: str, folder: Path, corpus: Path, processes: int) -> float:
    """Tokens/s of this many processes together."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = [pool.submit(bare, kind, folder, corpus, part, processes) for part in range(processes)]
        results = [future.result() for future in futures]
    return sum(tokens for tokens, _ in results) / max(seconds for _, seconds in results)


def tool_rate(flags: Sequence[str], folder: Path, corpus: Path, workers: int) -> tuple[float, float]:
    """(tokens/s, peak memory in MB of the main process and all workers) of the tool, as it counts itself."""
    summary = folder / "summary.json"
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", str(corpus), "--append-eod"]
    command += ["--output-prefix", str(folder / "out"), "--overwrite", "--workers", str(workers), *flags]
    subprocess.run([*command, "--summary-file", str(summary)], check=True, capture_output=True)
    found = json.loads(summary.read_text())
    peak = found["main_peak_memory"] + (workers * found["worker_peak_memory"] if workers > 1 else 0)
    return found["tokens"] / found["seconds"], peak / 1e6


def preprocess(folder: Path, rounds: int) -> Iterator[Row]:
    corpus = folder / "corpus.jsonl"
    write_corpus(corpus, MEGABYTES)
    flags = train_tokenizers(folder)
    kinds = {
        "SentencePiece": flags["SentencePiece"],
        "BPE, gigatoken": [*flags["BPE"], "--bpe-backend", "gigatoken"],
        "BPE, tokenizers": [*flags["BPE"], "--bpe-backend", "tokenizers"],
    }
    for kind, own in kinds.items():
        for workers in (1, 2):
            ours, theirs, peaks = [], [], []
            for _ in range(1 if kind == "BPE, tokenizers" else rounds):
                theirs.append(bare_rate(kind, folder, corpus, workers) / 1e6)
                rate, peak = tool_rate(own, folder, corpus, workers)
                ours.append(rate / 1e6)
                peaks.append(peak)
            spread, ceiling = Spread.of(ours), Spread.of(theirs)
            beside = f"{spread.median / ceiling.median:.0%} of the tokenizer alone, {ceiling:.2f}"
            yield Row("preprocess", f"{kind}, {workers} workers", "million tokens/s", spread, max(peaks), beside)


# Indices


def synthetic_lengths() -> np.ndarray:
    return np.random.RandomState(0).poisson(MEAN_TOKENS, DOCUMENTS).astype(np.int32)


def write_dataset(prefix: Path) -> None:
    """A data set of those lengths whose tokens are zeros."""
    from megatron.extensions.datasets.indexed_writer import IndexedDatasetBuilder

    lengths = synthetic_lengths()
    with IndexedDatasetBuilder(str(prefix), np.dtype(np.uint16)) as builder:
        for part in np.array_split(lengths, 200):
            builder.add_documents(np.zeros(int(part.sum()), np.uint16), part)


def open_dataset(prefix: Path, samples: int, cache: Path) -> GPTDataset:
    from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat
    from megatron.core.datasets.index_cache import IndexCache
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    format, indices = SampleFormat(SEQ, 0, None, False, False, False), IndexCache(str(cache), "")
    return GPTDataset(IndexedDataset(str(prefix)), range(DOCUMENTS), samples, format, seed=1234, cache=indices)


def build_gpt(prefix: Path, epochs: int, cache: Path) -> float:
    """Seconds from the files of a data set to its samples."""
    import megatron.core.datasets.gpt_dataset  # noqa: F401 (not a part of what is timed)

    samples = int(synthetic_lengths().sum(dtype=np.int64)) * epochs // SEQ - 1
    return seconds_of(lambda: open_dataset(prefix, samples, cache))


def build_blend(size: int, cache: Path) -> float:
    from megatron.core.datasets.index_cache import IndexCache
    from megatron.core.datasets.indices import BlendIndex, build_blend_index

    rule = {"weights": WEIGHTS, "size": size}
    indices = IndexCache(str(cache), "")
    return seconds_of(
        lambda: indices.arrays(BlendIndex._fields, "Blend", rule, lambda: build_blend_index(WEIGHTS, size))
    )


def index(folder: Path, rounds: int) -> Iterator[Row]:
    prefix = folder / "documents"
    write_dataset(prefix)
    cells: dict[str, tuple[Any, ...]] = {f"epochs {epochs}": (build_gpt, prefix, epochs) for epochs in (1, 3, 10)}
    cells |= {f"blend of {size // 10**6} million": (build_blend, size) for size in (10**6, 5 * 10**6)}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    arrays: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in cells.items():
            cache = folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            for state in ("cold", "warm"):
                found.setdefault((name, state), []).append(in_own_process(*call, cache))
            arrays[name] = sum(path.stat().st_size for path in cache.glob("*.npy")) / 2**20
    for (name, state), results in found.items():
        peak = max(memory for _, memory in results)
        beside = f"the arrays are {arrays[name]:,.0f} MB"
        yield Row("index", f"{name}, {state}", "s", Spread.of([seconds for seconds, _ in results]), peak, beside)


# Loading


def load_rate(prefix: Path, cache: Path, workers: int) -> float:
    """Millions of tokens a second out of the loader, in micro-batches of four samples."""
    from megatron.core.datasets.samplers import DataIterator

    steps, batch = 100, 32
    with closing(DataIterator(open_dataset(prefix, 100_000, cache), micro_batch_size=4, num_workers=workers)) as loader:
        loader.next_step(0, batch)
        seconds = seconds_of(lambda: [loader.next_step(step * batch, batch) for step in range(1, steps + 1)])
    return steps * batch * SEQ / seconds / 1e6


def load(folder: Path, rounds: int) -> Iterator[Row]:
    prefix = folder / "documents"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(prefix)
    for workers in (0, 2):
        rates = [in_own_process(load_rate, prefix, folder / "cache", workers)[0] for _ in range(rounds)]
        yield Row("load", f"{workers} worker threads", "million tokens/s", Spread.of(rates))


PARTS: dict[str, Callable[[Path, int], Iterator[Row]]] = {"preprocess": preprocess, "index": index, "load": load}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 3)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="where files of up to 3 GB go (default: a temporary folder)")
    args = parser.parse_args(argv)
    facts = machine("numpy", "sentencepiece", "tokenizers", "gigatoken")
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir=args.folder) as name:
        for part in args.part:
            for row in PARTS[part](Path(name), args.rounds):
                rows.append(row)
                memory = "" if row.peak_memory_mb is None else f"{row.peak_memory_mb:6,.0f} MB"
                what = f"{row.part:<11}{row.what:<28}"
                print(f"{what}{row.value:8.3f} {row.unit:<17}{memory:<10} {row.beside}", flush=True)
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
