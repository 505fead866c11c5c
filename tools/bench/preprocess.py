"""Measures tools/preprocess_data.py: speed, and that its memory does not grow with the input.

    python tools/bench/preprocess.py --workers 2

Gathers text from the source files on this machine, trains a tokenizer on part of it, tokenizes 10 MB and 100 MB, each
in a process of its own, and prints documents/s, MB/s and the peak memory of the main process and of a worker. Long
texts are cut into documents of at most 100,000 characters, as a tokenizer's memory grows with the longest document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[1]
DOCUMENT_CHARACTERS = 100_000
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp")


def texts(roots: Sequence[Path]) -> Iterator[str]:
    """Documents out of the sources below these folders, in a fixed order."""
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                try:
                    text = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                for start in range(0, len(text), DOCUMENT_CHARACTERS):
                    yield text[start : start + DOCUMENT_CHARACTERS]


def write_corpus(path: Path, megabytes: float, roots: Sequence[Path]) -> int:
    """Writes about so many MB of JSON lines; returns how often the texts were gone through."""
    size = rounds = 0
    with open(path, "w", encoding="utf-8") as out:
        while size < megabytes * 1e6:
            rounds += 1
            before = size
            for text in texts(roots):
                size += out.write(json.dumps({"text": text}) + "\n")
                if size >= megabytes * 1e6:
                    break
            if size == before:
                raise SystemExit(f"no text found below {', '.join(map(str, roots))}")
    return rounds


def run(script: str, *flags: object) -> None:
    command = [sys.executable, str(TOOLS / script), *map(str, flags)]
    print("+ " + " ".join(command), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(folder: Path, corpus: Path, workers: int, tokenizer: Sequence[object]) -> dict[str, Any]:
    """The summary of one run."""
    summary = folder / "summary.json"
    flags = ("--workers", workers, "--append-eod", "--log-interval", 10**9, "--overwrite", "--summary-file", summary)
    run("preprocess_data.py", "--input", corpus, "--output-prefix", folder / "out", *flags, *tokenizer)
    return json.loads(summary.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 100], help="sizes of input to measure")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--source", type=Path, nargs="+", help="folders of text (default: Python's own and installed)")
    args = parser.parse_args()
    roots = args.source or [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-preprocess-") as name:
        folder = Path(name)
        train = folder / "train.jsonl"
        write_corpus(train, 5, roots)
        flags = ("--vocab-size", args.vocab_size, "--output-prefix", folder / "tokenizer")
        run("train_tokenizer.py", "--input", train, *flags)
        model = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "tokenizer.model")
        for megabytes in args.megabytes:
            corpus = folder / f"corpus-{megabytes:g}.jsonl"
            rounds = write_corpus(corpus, megabytes, roots)
            rows.append((rounds, measure(folder, corpus, args.workers, model)))
    print(f"{args.workers} workers, SentencePiece BPE of {args.vocab_size} tokens")
    for rounds, row in rows:
        print(
            f"{row['input_bytes'] / 1e6:6.1f} MB{f' ({rounds} times over)' if rounds > 1 else ''}: "
            f"{row['documents_per_second']:,.0f} documents/s, {row['mb_per_second']:.2f} MB/s, peak memory "
            f"{row['main_peak_memory'] / 1e6:.0f} MB main, {row['worker_peak_memory'] / 1e6:.0f} MB worker"
        )


if __name__ == "__main__":
    main()
