"""Damage text files, token files and vocabulary files at random. Readers must either report the damage in one clear
error message or read the files correctly.

Each trial damages one file. A data tool, or the code that reads data in training, then reads the file in a separate
process with limited memory and time. The trial fails if the process

- ends with an error other than a user error (a traceback), with a signal, or not at all;
- prints a message that does not name the file;
- loses documents silently: in formats with checksums, any difference is a loss; in other formats, all documents must be
  present, except the damaged documents and their two neighbors. From a truncated file, the data before the cut must be
  read correctly.

No file format stores a checksum of token ids or vocabularies. The test therefore checks only that token ids are within
the vocabulary, and that the number of tokens equals the number stated in the file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import resource
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.text_data.flags import TextDataConfig
from megatron.extensions.data.text_data.tokenized import TextData
from tests.corpus import byte_level
from tests.forked import forked_ranks, join
from tools.common import run_tool
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


def arrow(texts: Sequence[str], as_file: bool = False) -> bytes:
    """Return table data in the Arrow stream or Arrow file format. In the file format, strings use 64-bit offsets."""
    import pyarrow as pa

    rows, out = pa.table({"text": pa.array(texts, pa.large_string() if as_file else pa.string())}), io.BytesIO()
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=9)
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": table,
    ".tsv": partial(table, delimiter="\t"),
    ".txt": lambda texts: "\n".join(texts).encode(),
    ".parquet": parquet,
    ".arrow": arrow,
    ".feather": partial(arrow, as_file=True),
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def content_of(name: str, texts: Sequence[str]) -> bytes:
    """Return the content of a file that contains `texts` in the format and compression of the suffixes in `name`."""
    suffix, *compression = Path(name).suffixes
    return COMPRESS["".join(compression)](FORMATS[suffix](texts))


CHECKED = (".parquet", *(f".jsonl{compression}" for compression in COMPRESS if compression))
"""Suffixes of file formats that contain checksums."""

DAMAGED = (".jsonl", ".json", ".csv", ".txt", ".arrow", *CHECKED)


@dataclass(frozen=True)
class Damage:
    """File content in which bytes [start, stop) of the original are damaged."""

    name: str
    content: bytes
    start: int
    stop: int


def _in_another_encoding(dice: Random, data: bytes) -> bytes:
    """Re-encode the content, as if an editor had saved the text in a different encoding, or as if a program had treated
    bytes as text."""
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
    # One huge record, as in a large file without line breaks.
    "huge": lambda dice, lost, behind: (
        dice.choice((b"x", b"[", b"\0", b'"', b'{"text":')) * (1 << dice.randrange(16, 22))
    ),
    "empty": lambda dice, lost, behind: dice.choice((b"", b"\n", b" " * 9, b"\xef\xbb\xbf")),
    "encoding": lambda dice, lost, behind: _in_another_encoding(dice, lost),
    "other": lambda dice, lost, behind: content_of(f"a{dice.choice(DAMAGED)}", TEXTS[2:9]),
}
"""Functions that return replacement bytes, keyed by kind of damage. The arguments are a random number generator, the
bytes to replace, and all bytes from their position on."""


def damaged(dice: Random, data: bytes) -> Damage:
    name, at, size = dice.choice([*NEW, "flip"]), dice.randrange(len(data)), dice.randrange(1, 200)
    ends = {"cut": len(data), "flip": at + 1, "replace": at + size, "remove": at + size}
    ends |= dict.fromkeys(("insert", "double", "huge"), at)
    start, stop = (at, min(ends[name], len(data))) if name in ends else (0, len(data))
    new = NEW[name](dice, data[start:stop], data[at : at + size])
    return Damage(name, data[:start] + new + data[stop:], start, stop)


@dataclass(frozen=True)
class Trial:
    """Input files of one kind, a function that reads the files, and a function that checks what was read."""

    name: str
    files: Mapping[str, bytes]
    """Contents of the files, keyed by file name. Only the first file is damaged."""

    read: Callable[[Path], Any]
    """Function that reads the files in a folder. The function runs in a separate process."""

    judge: Callable[[Damage, Any], str | None] = lambda damage, found: None
    """Function that describes the error in a result, or returns None if the result is correct."""


def _documents(prefix: str) -> list[str]:
    data = IndexedDataset(prefix)
    return [bytes(data[number][:-1].tolist()).decode("utf-8", "replace") for number in range(len(data))]


def _tool(main: Callable[[Sequence[str]], int], *argv: object) -> None:
    """Run a tool. If the tool's exit code is not 0, the function raises ValueError with the tool's output."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main([str(word) for word in argv])
    if code:
        raise ValueError(said.getvalue())


def _text_trial(suffix: str, by: str) -> Trial:
    name, whole, by_line = f"a{suffix}", content_of(f"a{suffix}", TEXTS), suffix == ".txt"
    texts = [line.removesuffix("\r") for text in TEXTS for line in text.split("\n") if line] if by_line else TEXTS
    unit = "line" if by_line else "file"

    def read(folder: Path) -> list[str]:
        if by == "preprocess_data":
            out = ("--output-prefix", folder / "out", "--append-eod", "--text-documents", unit, *BYTES)
            _tool(preprocess_data, "--input", folder / name, *out)
            return _documents(str(folder / "out_text_document"))
        config = DatasetConfig().with_options(TextDataConfig(text_documents=unit))
        text = TextData(config, TokenizerConfig(tokenizer_type="ByteTokenizer"), None, list)
        return _documents(text.prefix("--data-path", str(folder / name)))

    def judge(damage: Damage, found: list[str]) -> str | None:
        if found == texts or damage.name in ("empty", "encoding", "other", "huge"):
            return f"{found[:2]} of an empty file" if damage.name == "empty" and any(found) else None
        if suffix in CHECKED:
            return f"{len(found)} of {len(texts)} documents, not those that were written"
        if damage.name == "cut":
            return None if found[:-1] == texts[: len(found[:-1])] else "what was left of a cut file is not right"
        touched = 3 + whole[damage.start : damage.stop].count(b"document ")
        missing = sum((Counter(texts) - Counter(found)).values())
        return None if missing <= touched else f"{missing} documents are missing, of {touched} that were touched"

    return Trial(f"{by} {suffix}", {name: whole}, read, judge)


def _samples(prefix: str) -> list[list[int]]:
    """Return the samples that a training run reads."""
    config = DatasetConfig(data_path=(prefix,), split="90,10,0", data_cache_path=str(Path(prefix).parent / "cache"))
    made = build_datasets(config, seq_length=32, seed=3, sizes=(60, 5, 0), eod=256, vocab_size=257)
    return [split.text(n).tolist() for split in made if split is not None for n in range(len(split))]


def _token_trials(folder: Path) -> list[Trial]:
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS))
    _tool(preprocess_data, "--input", folder / "a.jsonl", "--output-prefix", folder / "t", "--append-eod", *BYTES)
    files = {path.name: path.read_bytes() for path in folder.glob("t_text_document.*")}
    undamaged = _samples(str(folder / "t_text_document"))

    def read(folder: Path, by: str) -> list[list[int]]:
        path = str(folder / "t_text_document")
        if by == "training":
            return _samples(path)
        if by == "inspect_dataset":
            _tool(inspect_dataset, path, "--show", 3, *BYTES)
        else:
            _tool(merge_datasets, "--input", path, "--output-prefix", folder / "merged")
            path = str(folder / "merged")
        data = IndexedDataset(path)
        return [data[number].tolist() for number in range(len(data))]

    def judge(damage: Damage, found: list[list[int]], by: str, name: str) -> str | None:
        count, highest = sum(map(len, found)), max((max(ids) for ids in found if ids), default=0)
        tokens = sum(len(text.encode()) + 1 for text in TEXTS)
        if by != "training" and count != tokens:
            return f"{count} tokens where {tokens} were written"
        if by == "training" and (found != undamaged if name.endswith("idx") else len(found) != len(undamaged)):
            return "other samples than those of the undamaged files"
        if by != "merge_datasets" and highest > 256:
            return f"token id {highest} of a vocabulary of 257"
        return None

    return [
        Trial(f"{by} {name}", _first(name, files), partial(read, by=by), partial(judge, by=by, name=name))
        for name in files
        for by in ("inspect_dataset", "merge_datasets", "training")
    ]


def _first(name: str, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    return {name: files[name], **files}


def _tokenizer_trials(kind: str, files: Mapping[str, bytes], **flags: str) -> list[Trial]:
    """Return one trial per damaged tokenizer file. `flags` maps configuration fields to the names of the files that
    they refer to."""

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

    return [Trial(f"{kind} {name}", _first(name, files), read, judge) for name in files]


def _tokenizers(folder: Path) -> list[Trial]:
    """Train small tokenizers, and return trials that damage their files."""
    (folder / "b.jsonl").write_bytes(json_lines(TEXTS * 3))
    _tool(train_tokenizer, "--input", folder / "b.jsonl", "--output-prefix", folder / "sp", "--vocab-size", 300)
    bpe = byte_level(TEXTS * 3, ["<|endoftext|>"], 320)
    bpe.model.save(str(folder))
    named = json.dumps({"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}).encode()
    whole = {"tokenizer.json": bpe.to_str().encode(), "tokenizer_config.json": named}
    gpt2 = {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    model = {"sp.model": (folder / "sp.model").read_bytes()}
    return [
        *_tokenizer_trials("SentencePieceTokenizer", model, tokenizer_model="sp.model"),
        *_tokenizer_trials("Llama2Tokenizer", model, tokenizer_model="sp.model"),
        *_tokenizer_trials("HuggingFaceTokenizer", whole, tokenizer_model="."),
        *_tokenizer_trials("GPT2BPETokenizer", gpt2, vocab_file="vocab.json", merge_file="merges.txt"),
    ]


TOO_LITTLE = "SentencePiece: Vocabulary size"
"""Beginning of SentencePiece's error message for text that is too small for the requested vocabulary."""


def _training_trial(suffix: str) -> Trial:
    """Return a trial that runs train_tokenizer on the damaged file. The trial only checks how the tool exits."""
    name = f"a{suffix}"

    def read(folder: Path) -> None:
        _tool(train_tokenizer, "--input", folder / name, "--output-prefix", folder / "sp", "--vocab-size", 320)

    return Trial(f"train_tokenizer {suffix}", {name: content_of(name, TEXTS)}, read)


def trials(folder: Path) -> list[Trial]:
    """Return one trial for each kind of input and each reader of this kind. The input files are created in `folder` as
    needed."""
    found = [_text_trial(suffix, by) for suffix in DAMAGED for by in ("preprocess_data", "data-path")]
    found += [*_token_trials(folder), *_tokenizers(folder)]
    return [*found, _training_trial(".jsonl"), _training_trial(".parquet")]


def _limit_memory(rank: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def run_trial(trial: Trial, dice: Random, folder: Path) -> tuple[str, str]:
    """Run a trial, and return its outcome and a description of the failure. The outcome is "told" if the reader
    reported the damage, "read" if it returned a correct result, and "failed" otherwise. The description is empty unless
    the trial failed."""
    name = next(iter(trial.files))
    damage = damaged(dice, trial.files[name])
    folder.mkdir()
    for each, content in {**trial.files, name: damage.content}.items():
        (folder / each).write_bytes(content)

    def main(argv: list[str]) -> int:
        run_tool(lambda: (folder / "found").write_bytes(pickle.dumps(trial.read(folder))) * 0)

    with forked_ranks(1, [], folder / "screen", _limit_memory, main) as ranks:
        (code,) = join(ranks)
    said = (folder / "screen").read_text()
    wrong: str | None = f"ended with code {code}: {said[-300:]}"
    if code == 2:
        named = any(text in said for text in (name, str(folder / Path(name).stem), TOO_LITTLE))
        wrong = None if named else f"does not name the file: {said[:300]!r}"
    elif code == 0:
        wrong = trial.judge(damage, pickle.loads((folder / "found").read_bytes()))
    if wrong:
        return "failed", f"{trial.name}, {damage.name} [{damage.start}:{damage.stop}]: {wrong}"
    return ("told" if code else "read"), ""
