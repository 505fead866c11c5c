"""Damages input files at random, and shows that what reads them says so in a clear line, or reads them right.

    python -m tests.extensions.text_data.input_corruption --trials 1000 --seed 1

Each trial writes one kind of input, damages it, and lets a tool or the data of a training run read it in a process of
its own, whose memory and time are limited. It fails if that process

- ends by an error that is not one of the user's (a traceback), by a signal, or not at all;
- says something that does not name the file;
- loses documents without a word: where the format has checksums, any difference is a loss; elsewhere all documents
  that the damage did not touch must be there, but for its two neighbours. Where a file was cut off at its end, what
  comes before must be right.

Of token ids and of vocabularies no format has a checksum: those must be within the vocabulary, and the data must have
as many tokens as it says.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import gzip
import io
import json
import lzma
import multiprocessing as mp
import os
import pickle
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.text_data.flags import TextDataConfig
from megatron.extensions.text_data.tokenized import TextData
from tests.corpus import byte_level
from tests.limits import HANG
from tools.inspect_dataset import main as inspect_dataset
from tools.merge_datasets import main as merge_datasets
from tools.preprocess_data import main as preprocess_data
from tools.train_tokenizer import main as train_tokenizer

MEMORY = 6 << 30
BYTES = ("--tokenizer-type", "ByteTokenizer")
TEXTS = [
    'quotes " and, commas; tabs\t and\r\nlines\n',
    "é 漢字 🙂 \\ / \u2028",
    *(f"document {n} " + "word " * (n % 30) for n in range(40)),
    "document last",
]


def json_lines(texts: Sequence[str]) -> bytes:
    rows = enumerate(texts)
    return b"".join(json.dumps({"id": n, "text": text}, ensure_ascii=n % 2 > 0).encode() + b"\n" for n, text in rows)


def json_array(texts: Sequence[str]) -> bytes:
    return json.dumps([{"id": n, "text": text} for n, text in enumerate(texts)], indent=1, ensure_ascii=False).encode()


def table(texts: Sequence[str], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([("id", "text"), *enumerate(texts)])
    return text.getvalue().encode("utf-8-sig")


def parquet(texts: Sequence[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    rows = pa.table({"id": range(len(texts)), "text": list(texts)})
    pq.write_table(rows, out, row_group_size=7, write_page_checksum=True)
    return out.getvalue()


def arrow(texts: Sequence[str]) -> bytes:
    import pyarrow as pa

    rows, out = pa.table({"text": list(texts)}), io.BytesIO()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=9)
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": table,
    ".txt": lambda texts: "\n".join(texts).encode(),
    ".parquet": parquet,
    ".arrow": arrow,
    ".jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    ".jsonl.bz2": lambda texts: bz2.compress(json_lines(texts)),
    ".jsonl.xz": lambda texts: lzma.compress(json_lines(texts)),
    ".jsonl.zst": lambda texts: zstandard.ZstdCompressor(write_checksum=True).compress(json_lines(texts)),
}
CHECKED = (".parquet", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst")
"""Formats with checksums of what they hold."""


@dataclass(frozen=True)
class Damage:
    """Content after damage of bytes [start, stop) of the original."""

    name: str
    content: bytes
    start: int
    stop: int


def _in_another_encoding(dice: Random, data: bytes) -> bytes:
    """As an editor saves it in another encoding, where it is text; else as one that takes bytes for text does."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1").encode("utf-8")
    return text.encode(dice.choice(("utf-16", "utf-32", "cp037")), "replace")


NEW: dict[str, Callable[[Random, bytes, bytes], bytes]] = {
    "cut": lambda dice, lost, behind: b"",
    "flip": lambda dice, lost, behind: bytes([lost[0] ^ 1 << dice.randrange(8)]),
    "replace": lambda dice, lost, behind: dice.randbytes(len(lost)) if dice.random() < 0.7 else bytes(len(lost)),
    "remove": lambda dice, lost, behind: b"",
    "insert": lambda dice, lost, behind: dice.randbytes(dice.randrange(1, 9)),
    "double": lambda dice, lost, behind: behind,
    # A record as long as a file may be that has lost its ends of lines.
    "huge": lambda dice, lost, behind: (
        dice.choice((b"x", b"[", b"\0", b'"', b'{"text":')) * (1 << dice.randrange(16, 22))
    ),
    "empty": lambda dice, lost, behind: dice.choice((b"", b"\n", b" " * 9, b"\xef\xbb\xbf")),
    "encoding": lambda dice, lost, behind: _in_another_encoding(dice, lost),
    "other": lambda dice, lost, behind: FORMATS[dice.choice(list(FORMATS))](TEXTS[2:9]),
}
"""Damage -> what stands in the place of the bytes that are lost, given these and those from there on."""


def damaged(dice: Random, data: bytes) -> Damage:
    name, at, size = dice.choice([*NEW, "flip"]), dice.randrange(len(data)), dice.randrange(1, 200)
    ends = {"cut": len(data), "flip": at + 1, "replace": at + size, "remove": at + size}
    ends |= dict.fromkeys(("insert", "double", "huge"), at)
    start, stop = (at, min(ends[name], len(data))) if name in ends else (0, len(data))
    new = NEW[name](dice, data[start:stop], data[at : at + size])
    return Damage(name, data[:start] + new + data[stop:], start, stop)


@dataclass
class Outcome:
    """What a process that read a damaged file did."""

    error: str | None = None
    """What it told the user; None if nothing was wrong."""

    result: Any = None
    crash: str | None = None
    """A traceback, a signal, or that it did not end."""


@dataclass(frozen=True)
class Trial:
    """One kind of input. `write` returns the file to be damaged; `read` gets the folder, in a process of its own, and
    returns a result; `judge` says what is wrong with that, if anything."""

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    judge: Callable[[Damage, Any], str | None]
    of_content: str = ""
    """How an error begins that is not about the file, but about how little is in it."""


def _documents(prefix: str) -> list[str]:
    data = IndexedDataset(prefix)
    return [bytes(data[number][:-1].tolist()).decode("utf-8", "replace") for number in range(len(data))]


def _tool(main: Callable[[Sequence[str]], int], *argv: object) -> None:
    """Raises ValueError with what a tool said if its code is not 0."""
    said = io.StringIO()
    with redirect_stderr(said):
        code = main([str(word) for word in argv])
    if code:
        raise ValueError(said.getvalue())


def _text_trial(suffix: str, by: str) -> Trial:
    name = f"a{suffix}"

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(FORMATS[suffix](TEXTS))
        return folder / name

    def read(folder: Path) -> list[str]:
        documents = ["--text-documents", "line"] if suffix == ".txt" else []
        if by == "preprocess_data":
            out = ("--output-prefix", folder / "out", "--append-eod", *BYTES)
            _tool(preprocess_data, "--input", folder / name, *out, *documents)
            return _documents(str(folder / "out_text_document"))
        config = DatasetConfig().with_options(TextDataConfig(text_documents="line" if documents else "file"))
        text = TextData(config, TokenizerConfig(tokenizer_type="ByteTokenizer"), None, list)
        return _documents(text.prefix("--data-path", str(folder / name)))

    def judge(damage: Damage, found: list[str]) -> str | None:
        whole = FORMATS[suffix](TEXTS)
        texts = TEXTS
        if suffix == ".txt":
            texts = [line.removesuffix("\r") for text in TEXTS for line in text.split("\n") if line]
        if found == texts or damage.name in ("empty", "encoding", "other", "huge"):
            return f"{found[:2]} of an empty file" if damage.name == "empty" and any(found) else None
        if suffix in CHECKED:
            return f"{len(found)} of {len(texts)} documents, not those that were written"
        if damage.name == "cut":
            return None if found[:-1] == texts[: len(found[:-1])] else "what was left of a cut file is not right"
        touched = 3 + whole[damage.start : damage.stop].count(b"document ")
        missing = sum((Counter(texts) - Counter(found)).values())
        return None if missing <= touched else f"{missing} documents are missing, of {touched} that were touched"

    return Trial(f"{by} {suffix}", write, read, judge)


def _write_tokens(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        preprocess_data(
            ["--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "t"), "--append-eod", *BYTES]
        )


def _samples(prefix: str) -> list[list[int]]:
    """What a training run would read."""
    config = DatasetConfig(data_path=(prefix,), split="90,10,0", data_cache_path=str(Path(prefix).parent / "cache"))
    made = build_datasets(config, seq_length=32, seed=3, sizes=(60, 5, 0), eod=256, vocab_size=257)
    return [split.text(n).tolist() for split in made if split is not None for n in range(len(split))]


@cache
def _undamaged() -> list[list[int]]:
    with tempfile.TemporaryDirectory() as name:
        _write_tokens(Path(name))
        return _samples(f"{name}/t_text_document")


def _token_trial(suffix: str, by: str) -> Trial:
    prefix = "t_text_document"

    def write(folder: Path) -> Path:
        _write_tokens(folder)
        return folder / f"{prefix}{suffix}"

    def read(folder: Path) -> list[list[int]]:
        path = str(folder / prefix)
        if by == "inspect_dataset":
            _tool(inspect_dataset, path, "--show", 3, *BYTES)
        elif by == "merge_datasets":
            _tool(merge_datasets, "--input", path, "--output-prefix", folder / "merged")
            path = str(folder / "merged")
        else:
            return _samples(path)
        data = IndexedDataset(path)
        return [data[number].tolist() for number in range(len(data))]

    def judge(damage: Damage, found: list[list[int]]) -> str | None:
        count, highest = sum(map(len, found)), max((max(ids) for ids in found if ids), default=0)
        tokens = sum(len(text.encode()) + 1 for text in TEXTS)
        if by != "training" and count != tokens:
            return f"{count} tokens where {tokens} were written"
        if by == "training" and (found != _undamaged() if suffix == ".idx" else len(found) != len(_undamaged())):
            return "other samples than those of the undamaged files"
        if by != "merge_datasets" and highest > 256:
            return f"token id {highest} of a vocabulary of 257"
        return None

    return Trial(f"{by} {suffix}", write, read, judge)


def _tokenizer_trial(kind: str, made: dict[str, bytes], names: tuple[str, ...], flags: dict[str, str]) -> Trial:
    """`made`: the files of the tokenizer; one of `names` is damaged, by the name of the folder."""

    def write(folder: Path) -> Path:
        for name, content in made.items():
            (folder / name).write_bytes(content)
        return folder / names[sum(map(ord, folder.name)) % len(names)]

    def read(folder: Path) -> tuple[int, list[int]]:
        config = TokenizerConfig(tokenizer_type=kind, **{field: str(folder / name) for field, name in flags.items()})
        tokenizer = build_tokenizer(config)
        ids = [id for text in TEXTS for id in tokenizer.tokenize(text)]
        tokenizer.detokenize(ids)
        return tokenizer.vocab_size, ids

    def judge(damage: Damage, found: tuple[int, list[int]]) -> str | None:
        size, ids = found
        outside = [id for id in ids if not 0 <= id < size]
        return f"token ids {outside[:3]} of a vocabulary of {size}" if outside else None

    return Trial(f"{kind} {'/'.join(names)}", write, read, judge)


def _tokenizers(folder: Path) -> list[Trial]:
    """Trains small ones."""
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS * 3))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        flags = ["--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "sp"), "--vocab-size", "300"]
        assert train_tokenizer(flags) == 0
    bpe = byte_level(TEXTS * 3, ["<|endoftext|>"], 320)
    bpe.model.save(str(folder))
    named = json.dumps({"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}).encode()
    whole = {"tokenizer.json": bpe.to_str().encode(), "tokenizer_config.json": named}
    gpt2 = {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    model = {"sp.model": (folder / "sp.model").read_bytes()}
    where = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    return [
        _tokenizer_trial("SentencePieceTokenizer", model, ("sp.model",), {"tokenizer_model": "sp.model"}),
        _tokenizer_trial("Llama2Tokenizer", model, ("sp.model",), {"tokenizer_model": "sp.model"}),
        _tokenizer_trial("HuggingFaceTokenizer", whole, tuple(whole), {"tokenizer_model": "."}),
        _tokenizer_trial("GPT2BPETokenizer", gpt2, tuple(gpt2), where),
    ]


def _other_tools(suffix: str) -> Trial:
    """train_tokenizer, of which nothing but its ways to end can be judged."""
    base = _text_trial(suffix, "train_tokenizer")

    def read(folder: Path) -> None:
        flags = ("--output-prefix", folder / "sp", "--vocab-size", 320)
        _tool(train_tokenizer, "--input", folder / f"a{suffix}", *flags)

    return Trial(base.name, base.write, read, lambda damage, found: None, "SentencePiece: Vocabulary size")


def trials(folder: Path) -> list[Trial]:
    """All kinds of input, each by all that reads it."""
    found = [_text_trial(suffix, by) for suffix in FORMATS for by in ("preprocess_data", "data-path")]
    found += [_token_trial(s, by) for s in (".bin", ".idx") for by in ("inspect_dataset", "merge_datasets", "training")]
    return [*found, *_tokenizers(folder) * 2, _other_tools(".jsonl"), _other_tools(".parquet")]


def run_alone(work: Callable[[], Any]) -> Outcome:
    """Runs `work` in a process of its own, with limits."""
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "answer"
        process = mp.get_context("fork").Process(target=_child, args=(work, answer))
        process.start()
        process.join(HANG)
        if process.is_alive():
            process.kill()
            process.join()
            return Outcome(crash=f"had not ended after {HANG:.0f} s")
        if not answer.exists():
            return Outcome(crash=f"ended with code {process.exitcode}")
        return pickle.loads(answer.read_bytes())  # type: ignore[no-any-return]


def _child(work: Callable[[], Any], answer: Path) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    outcome = Outcome()
    try:
        outcome.result = work()
    except (ValueError, OSError) as error:  # what run_tool and the program print as a line each
        outcome.error = str(error)
        if isinstance(error, UnicodeError | json.JSONDecodeError):
            outcome.crash = traceback.format_exc()
    except SystemExit as error:
        outcome.error = f"exit {error.code}"
    except BaseException:
        outcome.crash = traceback.format_exc()
    answer.write_bytes(pickle.dumps(outcome))
    os._exit(0)


def run_trial(trial: Trial, number: int, seed: int) -> tuple[str, str]:
    """(whether the damage of a file, in a folder of its own, was told, read or failed; what is wrong, if anything)"""
    dice = Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / f"damaged-{number}"
        folder.mkdir()
        path = trial.write(folder)
        damage = damaged(dice, path.read_bytes())
        path.write_bytes(damage.content)
        outcome = run_alone(lambda: trial.read(folder))
    told = outcome.error is not None
    if told and outcome.crash is None:
        named = path.name in outcome.error or str(folder / path.stem) in outcome.error
        of_content = trial.of_content and outcome.error.startswith(trial.of_content)
        wrong = "" if named or of_content else f"does not name the file: {outcome.error[:300]!r}"
    else:
        wrong = outcome.crash or trial.judge(damage, outcome.result)
    if wrong:
        return "failed", f"trial {number}: {trial.name}, {damage.name} [{damage.start}:{damage.stop}]: {wrong}"
    return "told" if told else "read", ""


def campaign(count: int, seed: int, first: int = 0, only: str = "") -> Counter[str]:
    """Trials `first` to `first + count`, the kinds of input in turns; those whose name contains `only`."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        kinds = trials(Path(name))
    for number in range(first, first + count):
        trial = kinds[number % len(kinds)]
        if only in trial.name:
            kind, wrong = run_trial(trial, number, seed)
            counts[kind] += 1
            print(wrong, end="\n" if wrong else "")
        if (number + 1) % 100 == 0:
            print(f"{number + 1} trials: {dict(counts)}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of input whose name contains this")
    args = parser.parse_args()
    counts = campaign(args.trials, args.seed, args.first, args.only)
    print(f"{counts['told']} told, {counts['read']} read right, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
