"""End-to-end tests of the data tools. As on a user's machine, the tools run outside the repository."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.text_data import encoding
from tests.cli.test_extension import EXTENSION, FLAGS
from tests.corpus import ending_texts
from tests.forked import ROOT, run_program
from tests.limits import HANG, wait_for
from tools.preprocess_data import main as preprocess_data

FIXTURES = ROOT / "tests" / "fixtures" / "megatron_order"
CASES = json.loads((FIXTURES / "manifest.json").read_text())
BYTES = ("--tokenizer-type", "ByteTokenizer")


def tool(name, *flags, code=0):
    """Run a tool in a fork of this process, and return its output."""
    done = run_program(ROOT / "tools" / name, *flags, cwd=Path("/"))
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def jsonl(path, texts, **more):
    path.write_text("".join(json.dumps({"text": text} | more) + "\n" for text in texts))
    return path


def texts_of(prefix):
    dataset = IndexedDataset(str(prefix))
    return [bytes(t for t in dataset[i] if t < 256).decode() for i in range(len(dataset))]


def content(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.fixture
def corpus(tmp_path):
    """Write four JSON lines files with 3 documents each. Some files are uncompressed. The others are compressed with
    gzip, or with zstandard in two frames."""
    import zstandard

    texts = [f"document {i}\n" + "é" * (i * 500) for i in range(12)]
    lines = [json.dumps({"text": text, "id": str(i)}).encode() + b"\n" for i, text in enumerate(texts)]
    parts = [b"".join(lines[start : start + 3]) for start in range(0, 12, 3)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + parts[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(parts[1]))
    frames = [zstandard.compress(lines[6]), zstandard.compress(b"".join(lines[7:9]))]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "d.jsonl").write_bytes(parts[3].rstrip(b"\n"))
    return tmp_path, texts


@pytest.mark.parametrize("name", ["preprocess_data", "train_tokenizer", "merge_datasets", "inspect_dataset"])
def test_a_tool_finds_its_modules_from_anywhere(name):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=HANG)
    assert done.returncode == 0 and f"usage: {name}.py" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tokenizer-type TikTokenizer", "argument --tokenizer-type: invalid choice: 'TikTokenizer'"),
        ("--input a --output-prefix b --no-such 1", "unrecognized arguments: --no-such 1"),
    ],
)
def test_errors_about_flags_do_not_print_the_whole_usage(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        preprocess_data(flags.split())
    reason, remedy = capsys.readouterr().err.splitlines()
    assert said in reason and remedy == "--help lists the flags"


# preprocess_data


@pytest.mark.parametrize("workers", [1, 3])
def test_preprocess_keeps_the_order_of_files_globs_and_workers(corpus, workers):
    folder, texts = corpus
    flags = ("--append-eod", "--json-keys", "text", "id", "--workers", workers, *BYTES)
    shown = tool("preprocess_data.py", "--input", f"{folder}/*.jsonl*", "--output-prefix", folder / "out", *flags)
    assert texts_of(folder / "out_text_document") == texts
    assert texts_of(folder / "out_id_document") == [str(i) for i in range(12)]
    dataset = IndexedDataset(str(folder / "out_text_document"))
    assert all(dataset[i][-1] == 256 for i in range(12)) and dataset.dtype == np.uint16
    assert "documents 12" in shown and "MB/s" in shown and "in a worker" in shown


def test_bad_lines_are_named_and_set_the_exit_code(tmp_path):
    lines = [b'{"text": "good"}', b'{"text": 3}', b"", b'{"txt": "x"}', b"nope", b'{"text": "\xff"}', b"[1]"]
    lines += [b'{"text": "\\ud800"}', b'{"text": ""}', b'{"text": "last"}']
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b"\n".join(lines))
    flags = ("--input", source, "--output-prefix", tmp_path / "out", *BYTES)
    shown = tool("preprocess_data.py", *flags, code=1)
    for number, reason in (
        (2, "'text' is not text, but a number"),
        (4, "no key 'text' (--json-keys); the keys are 'txt'"),
        (5, "not JSON"),
        (6, "not UTF-8: byte 10 of the line is 0xff"),
        (7, "not a JSON object, but a list"),
        (8, "not Unicode text"),
    ):
        assert f"{source}:{number}: {reason}" in shown
    assert "empty documents 1, blank lines 1, bad lines 6" in shown
    assert "--max-bad-lines allows for 0" in shown
    assert texts_of(tmp_path / "out_text_document") == ["good", "last"]
    assert IndexedDataset(str(tmp_path / "out_text_document")).num_documents == 3
    tool("preprocess_data.py", *flags, "--overwrite", "--max-bad-lines", 6)


def test_preprocess_does_not_replace_files_unasked(tmp_path):
    flags = ("--input", jsonl(tmp_path / "a.jsonl", ["one"]), "--output-prefix", tmp_path / "out", *BYTES)
    tool("preprocess_data.py", *flags)
    before = content(tmp_path / "out_text_document")
    assert "--overwrite" in tool("preprocess_data.py", *flags, "--append-eod", code=2)
    assert content(tmp_path / "out_text_document") == before
    tool("preprocess_data.py", *flags, "--append-eod", "--overwrite")
    assert content(tmp_path / "out_text_document") != before


def test_preprocess_names_every_mistake_at_once(tmp_path):
    shown = tool(
        "preprocess_data.py",
        *("--input", "/no/such.jsonl", tmp_path, "--output-prefix", tmp_path / "out", "--workers", 0),
        *("--tokenizer-type", "GPT2BPETokenizer", "--split-sentences"),
        code=2,
    )
    folder = "no file in the folder has a known suffix"
    for part in ("--workers 0", "/no/such.jsonl", folder, "--vocab-file", "--merge-file", "--split-sentences"):
        assert part in shown
    assert "Traceback" not in shown


def test_flags_without_effect_are_reported(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["1 2 3"])
    shown = tool(
        "preprocess_data.py",
        *("--input", source, "--output-prefix", tmp_path / "out", "--partitions", 4, "--keep-sequential-samples"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 70000, "--append-eod"),
    )
    assert "--partitions has no effect here" in shown and "--keep-sequential-samples has no effect" in shown
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.dtype == np.int32 and dataset[0].tolist() == [1, 2, 3, 69999]


def test_input_without_documents_writes_nothing(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["", ""])
    flags = ("--input", source, "--output-prefix", tmp_path / "out", *BYTES)
    assert "no document with text" in tool("preprocess_data.py", *flags, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number, code):
    os.mkfifo(tmp_path / "endless.jsonl")
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(tmp_path / "endless.jsonl")]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "2", *BYTES]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with open(tmp_path / "endless.jsonl", "w") as pipe:
        pipe.write('{"text": "x"}\n' * 50_000)
        pipe.flush()
        wait_for(lambda: list(tmp_path.glob(".out*")))
        process.send_signal(number)
        _, shown = process.communicate(timeout=HANG)
    assert process.returncode == code, shown
    assert [path.name for path in tmp_path.iterdir()] == ["endless.jsonl"]
    assert "Traceback" not in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_signal_interrupts_the_start_of_a_worker(monkeypatch, number):
    """If a signal interrupted a worker at its start, the process pool would not notice that the worker has ended."""

    class Pool:
        def __init__(self, *_):
            self.started = self.ended = False
            pools.append(self)

        def submit(self, *_):
            signal.raise_signal(number)
            self.started = True

        def shutdown(self, **_):
            self.ended = True

    def stop(*_):
        raise KeyboardInterrupt

    pools = []
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", Pool)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(encoding.encode_all(None, [None], 2))
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert [(pool.started, pool.ended) for pool in pools] == [(True, True)]


# Tests of train_tokenizer and of the whole workflow


def test_text_survives_training_a_tokenizer_and_tokenizing(tmp_path):
    texts = [f"def function_{i}(argument):\n    return argument * {i}  # naïve\n" for i in range(200)]
    source = jsonl(tmp_path / "text.jsonl", texts)
    prefix = tmp_path / "deep" / "tok"
    said = tool("train_tokenizer.py", "--input", source, "--vocab-size", 400, "--output-prefix", prefix)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["tok.model", "tok.vocab"]
    assert "lossy" not in said
    first = prefix.with_suffix(".model").read_bytes()
    tool("train_tokenizer.py", "--input", source, "--vocab-size", 400, "--output-prefix", prefix, "--overwrite")
    assert prefix.with_suffix(".model").read_bytes() == first
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{prefix}.model")
    tool("preprocess_data.py", "--input", source, "--output-prefix", tmp_path / "out", "--append-eod", *tokenizer)
    shown = tool("inspect_dataset.py", tmp_path / "out_text_document", "--show", 2, *tokenizer)
    assert "documents 200" in shown and "do not end with EOD (4): 0" in shown
    assert repr(texts[1] + "<EOD>") in shown


LOSSY = [
    ("--model-type char --no-byte-fallback --vocab-size 8", "all line breaks, characters outside its vocabulary;"),
    ("--model-type char --vocab-size 264 --normalization-rule-name nfkc", "all spaces;"),
]


@pytest.mark.parametrize(("flags", "lost"), LOSSY)
def test_a_lossy_tokenizer_reports_its_losses(tmp_path: Path, flags: str, lost: str) -> None:
    source = jsonl(tmp_path / "text.jsonl", ["a b ab", "b  a"])
    said = tool("train_tokenizer.py", "--input", source, "--output-prefix", tmp_path / "tok", *flags.split())
    assert f"note: the tokenizer is lossy: decoding does not restore {lost}" in said


MISTAKES = [
    (("--vocab-size", 100), "256 bytes with --byte-fallback"),
    (("--vocab-size", 90000), "more than this much text supports"),
    (("--vocab-size", 300, "--json-keys", "body"), "no key 'body'"),
    (("--vocab-size", 300, "--character-coverage", 2), "--character-coverage 2.0"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_tokenizer_training_errors_state_a_remedy(tmp_path, flags, message):
    source = jsonl(tmp_path / "text.jsonl", ["some words in a line"])
    shown = tool("train_tokenizer.py", "--input", source, "--output-prefix", tmp_path / "tok", *flags, code=2)
    assert message in shown and "Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_trained_tokenizer_works_for_data_training_and_generation(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "line {i} of a text"}}\n' for i in range(40)))
    own = ("--extension", str(EXTENSION), "--tokenizer-type", "OwnTokenizer")
    prefix = str(tmp_path / "out")
    for command in (
        ("tools/preprocess_data.py", "--input", str(tmp_path / "in.jsonl"), "--output-prefix", prefix, "--append-eod",
         "--workers", "2"),
        ("tools/inspect_dataset.py", f"{prefix}_text_document", "--show", "1"),
        ("pretrain_gpt.py", *FLAGS[: FLAGS.index("--vocab-size")], "--data-path", f"{prefix}_text_document", "--lr",
         "1e-3", "--cpu", "--train-iters", "2", "--global-batch-size", "4", "--split", "1,0,0", "--eval-iters", "0"),
    ):  # fmt: skip
        done = run_program(*command, *own, code=0)
        assert "inspect" not in command[0] or "LINE 0 OF A TEXT" in done.stdout


# merge_datasets


def test_merge_equals_preprocessing_all_at_once(tmp_path):
    one = jsonl(tmp_path / "1.jsonl", ["a", "", "bb"])
    two = jsonl(tmp_path / "2.jsonl", ["ccc"])
    for name, inputs in (("x1", [one]), ("x2", [two]), ("all", [one, two])):
        out = tmp_path / "parts" / name if name != "all" else tmp_path / name
        tool("preprocess_data.py", "--input", *inputs, "--output-prefix", out, "--append-eod", *BYTES)
    tool("merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "all_text_document")
    shown = tool("merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "merged", code=2)
    assert "--overwrite" in shown


def test_merge_refuses_incompatible_inputs(tmp_path):
    given = "--input", FIXTURES / "alpha", FIXTURES / "gamma", "/no/x"
    shown = tool("merge_datasets.py", *given, "--output-prefix", tmp_path / "out", code=2)
    assert "uint16: " in shown and "int32: " in shown and "/no/x.idx" in shown
    assert list(tmp_path.iterdir()) == []


# inspect_dataset


def test_dump_equals_the_samples_of_megatron_lm(tmp_path):
    """This test dumps a blend of data sets. `tests/pure/test_data_order.py` tests all other cases."""
    case = next(case for case in CASES if case["blend"][1])
    prefixes, weights = case["blend"]
    paths = [value for weight, prefix in zip(weights, prefixes, strict=True) for value in (weight, FIXTURES / prefix)]
    counts = zip(("train", "valid", "test"), case["sizes"], strict=True)
    tool(
        "inspect_dataset.py",
        *("--data-path", *paths, "--split", case["split"], "--seq-length", case["seq"], "--seed", case["seed"]),
        *(value for split, size in counts for value in (f"--{split}-samples", size)),
        *("--data-cache-path", tmp_path / "cache", "--dump", tmp_path / "dump.npz"),
    )
    dumped, recorded = np.load(tmp_path / "dump.npz"), np.load(FIXTURES / f"{case['name']}.npz")
    assert sorted(dumped.files) == sorted(recorded.files)
    for name in recorded.files:
        np.testing.assert_array_equal(dumped[name], recorded[name])


def test_inspect_describes_data_and_detects_damage(tmp_path):
    shown = tool("inspect_dataset.py", FIXTURES / "alpha", "--eod", 1)
    assert "documents 60, sequences 60, tokens 2,420" in shown and "token ids: 1 to 511" in shown
    for suffix in (".bin", ".idx"):
        data = bytearray((FIXTURES / f"alpha{suffix}").read_bytes())
        if suffix == ".idx":
            data[34 + 60 * 4 + 8] ^= 1
        (tmp_path / f"x{suffix}").write_bytes(data)
    assert "sequence 1 starts at byte" in tool("inspect_dataset.py", tmp_path / "x", code=1)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    for given in (("inspect_dataset.py",), ("merge_datasets.py", "--output-prefix", tmp_path / "y", "--input")):
        remedy = "is text; give the prefix of an indexed dataset"
        assert remedy in tool(*given, tmp_path / "x.jsonl", code=2)
    assert "has no epoch: give --train-samples N" in tool(
        "inspect_dataset.py",
        *("--data-path", 1, FIXTURES / "alpha", "--seq-length", 8, "--dump", tmp_path / "x.npz"),
        code=2,
    )


@pytest.mark.parametrize("before", [[], ["<|begin|>"], ["<|endoftext|>"]])
@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_a_document_ends_with_one_eod(tmp_path, before, backend):
    """The tokenizer itself appends EOD."""
    if backend == "gigatoken":
        pytest.importorskip("gigatoken")
    (tmp_path / "a.jsonl").write_text('{"text": "the fox"}\n')
    model = ending_texts(tmp_path, before)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--bpe-backend", backend]
    expected = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", model)).tokenize("the fox")
    for more in ([], ["--append-eod"]):
        prefix = str(tmp_path / f"out{len(more)}")
        assert preprocess_data(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", prefix, *flags, *more]) == 0
        assert IndexedDataset(f"{prefix}_text_document")[0].tolist() == expected
