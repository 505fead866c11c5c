"""Tests of training directly on text files: cached tokens, JSON keys, source names and logged samples."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.build import build_datasets, source_lines
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.path_kind import data_kind_of, refusal
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.text_data import identity
from megatron.extensions.data.text_data import tokenized as tokenized_module
from megatron.extensions.data.text_data.encoding import Job, encode_all
from megatron.extensions.data.text_data.flags import TextDataConfig
from megatron.extensions.data.text_data.path_kind import TEXT
from megatron.extensions.data.text_data.tokenized import TextData
from megatron.training.tasks import start_run
from megatron.training.training import train
from tests.corpus import hf_folder
from tests.extensions.text_data.input_corruption import TEXTS as DOCUMENTS
from tests.extensions.text_data.input_corruption import (
    content_of,
    json_array,
    json_lines,
    run_trial,
    table,
    trials,
)
from tests.forked import run_program
from tests.harness import run_world, running
from tests.pure.test_path_kind import check_kind
from tests.rules import BASE, problems
from tests.tiny import TINY
from tools import inspect_dataset
from tools.preprocess_data import main as preprocess

TEXTS = ["", "x" * 70_000, *DOCUMENTS]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a local S3 server and yield a bucket on it."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import boto3

    patch = pytest.MonkeyPatch()
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "ENDPOINT_URL": f"http://{host}:{port}",
        "EC2_METADATA_DISABLED": "true",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in (variables | dict.fromkeys(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), "testing")).items():
        patch.setenv(f"AWS_{name}", value)
    boto3.client("s3").create_bucket(Bucket="texts")
    yield "s3://texts"
    server.stop()
    patch.undo()


def samples(prefix: str) -> list[bytes]:
    config = DatasetConfig(data_path=(prefix,), split="90,10,0")
    train, valid, _ = build_datasets(config, seq_length=64, seed=3, sizes=(500, 20, 0), eod=256, vocab_size=257)
    assert train is not None and valid is not None
    return [dataset[n]["tokens"].tobytes() for dataset in (train, valid) for n in range(len(dataset))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the dataset that the preprocessing tool makes from the documents."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS))
    flags = ("--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "out"), "--append-eod")
    assert preprocess([*flags, "--tokenizer-type", "ByteTokenizer"]) == 0
    return str(folder / "out_text_document")


BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


def tokenized(
    value: str, data_cache_path: str | None = None, tokenizer: TokenizerConfig = BYTES, **config: object
) -> str:
    data = DatasetConfig(data_cache_path=data_cache_path).with_options(TextDataConfig(**config))  # type: ignore[arg-type]
    return TextData(data, tokenizer, None, list).prefix("--data-path", value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet", "folder"])
def test_samples_of_text_match_the_dataset_it_would_become(tmp_path: Path, written: str, name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.json").write_bytes(json_array(TEXTS[:9]))
        (tmp_path / name / "2.csv").write_bytes(table(TEXTS[9:]))
    else:
        (tmp_path / name).write_bytes(content_of(name, TEXTS))
    made = tokenized(str(tmp_path / name))
    for suffix in (".bin", ".idx"):
        assert Path(made + suffix).read_bytes() == Path(written + suffix).read_bytes()
    assert samples(made) == samples(written)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_remote_text_is_read(tmp_path: Path, written: str, s3: str, name: str) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket="texts", Key=f"{name}-folder/{name}", Body=content_of(name, TEXTS))
    for value in (f"{s3}/{name}-folder/{name}", f"{s3}/{name}-folder", f"{s3}/{name}-f*/*"):
        made = tokenized(value, data_cache_path=str(tmp_path))
        assert Path(made + ".bin").read_bytes() == Path(written + ".bin").read_bytes()
    with pytest.raises(ValueError, match="there is no such file"):
        tokenized(f"{s3}/nothing.jsonl", data_cache_path=str(tmp_path))
    with pytest.raises(ValueError, match="need a folder; add --data-cache-path"):
        tokenized(f"{s3}/{name}-folder")


def test_text_is_tokenized_again_only_after_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    first = tokenized(str(path))
    assert tokenized(str(path)) == first and caplog.text.count("tokenizing 1 file") == 1
    by_line = tokenized(str(path), text_documents="line")
    assert len(IndexedDataset(first)) == 1 and len(IndexedDataset(by_line)) == 2
    path.write_text("one\ntwo\nthree\n")
    assert tokenized(str(path)) != first
    assert IndexedDataset(tokenized(str(path), append_eod=False))[0].tolist() == list(b"one\ntwo\nthree\n")


def test_only_changed_content_is_tokenized_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text file is not tokenized again if only its name, folder or modification time changes."""
    cache, state = str(tmp_path / "cache"), (10**18, 10**18)

    def tokens(folder: str, text: str, name: str = "a.txt") -> list[int]:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=state)
        return IndexedDataset(tokenized(str(path), cache))[0].tolist()[:-1]

    assert tokens("one", "first") == list(b"first")
    assert tokens("two", "other") == list(b"other"), "same name, size and time"
    assert tokens("one", "again") == list(b"again"), "changed in place with the old modification time"
    assert tokens("three", "first", "b.txt") == list(b"first") and tokens("one", "first") == list(b"first")
    assert caplog.text.count("tokenizing 1 file") == 4, "once more for the new name, but not again for known text"


def test_damaged_tokens_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one text")
    prefix = tokenized(str(path))
    written = {suffix: Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    for suffix, content in written.items():
        changed = bytearray(content)
        changed[-1] ^= 1
        Path(prefix + suffix).write_bytes(changed)
        caplog.clear()
        assert tokenized(str(path)) == prefix and Path(prefix + suffix).read_bytes() == content
        assert f"{prefix}{suffix} has changed since it was written; tokenizing again" in caplog.text
    os.utime(prefix + ".bin")  # a copy has the same content and a different modification time
    caplog.clear()
    assert tokenized(str(path)) == prefix and not caplog.text
    assert sorted(each.name for each in Path(prefix).parent.parent.iterdir()) == [
        Path(prefix).parent.name,
        "digests.json",
    ]


def test_tokens_record_their_source(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one text")
    told = json.loads((Path(tokenized(str(path))).parent / "made_from.json").read_text())
    assert told["inputs"] == [{"path": str(path), "bytes": 8, "content": told["files"][0][0]}]
    assert told["tokenizer"]["type"] == "ByteTokenizer" and told["append_eod"] is True
    assert sorted(told["written"]) == ["text_document.bin", "text_document.idx"]


def test_a_file_that_changes_while_it_is_tokenized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one text")

    def changing(job: Job, chunks: object, workers: int) -> Iterator[object]:
        yield from encode_all(job, chunks, workers)  # type: ignore[arg-type]
        path.write_text("another text")

    monkeypatch.setattr(tokenized_module, "encode_all", changing)
    with pytest.raises(ValueError, match=r"a\.txt changed while it was tokenized; start again"):
        tokenized(str(path))
    monkeypatch.undo()
    assert IndexedDataset(tokenized(str(path)))[0].tolist() == [*b"another text", 256]


def test_another_revision_of_a_tokenizer_gives_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is tokenized again if the revision of a tokenizer in the Hugging Face cache changes, or if a file next
    to a tokenizer.json changes."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--lab--m"
    for revision, special in (("1", "<|a|>"), ("2", "<|b|>")):
        (model / "snapshots").mkdir(parents=True, exist_ok=True)
        names = {"tokenizer_config.json": {"eos_token": special}}
        hf_folder(model / "snapshots" / revision, names, [special])
    (model / "refs").mkdir()
    (tmp_path / "a.txt").write_text("<|a|> or <|b|>")
    found = []
    for revision in ("1", "2", "1"):
        (model / "refs" / "main").write_text(revision)
        config = TokenizerConfig("HuggingFaceTokenizer", "lab/m")
        found.append(IndexedDataset(tokenized(str(tmp_path / "a.txt"), tokenizer=config))[0].tolist())
        assert found[-1] == [*build_tokenizer(config).tokenize("<|a|> or <|b|>"), 1]
    assert found[0] == found[2] != found[1]
    file = model / "snapshots" / "1" / "tokenizer.json"
    config = TokenizerConfig("HuggingFaceTokenizer", str(file))
    assert tokenized(str(tmp_path / "a.txt"), tokenizer=config) == tokenized(
        str(tmp_path / "a.txt"), tokenizer=TokenizerConfig("HuggingFaceTokenizer", "lab/m")
    ), "the same files, by another name"
    (file.parent / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert IndexedDataset(tokenized(str(tmp_path / "a.txt"), tokenizer=config))[0].tolist()[-1] == 0


def test_changed_tokenizer_code_gives_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "class Own:\n    eod, bos, vocab_size = 0, None, 2\n    def tokenize(self, text): return [1] * (len(text) {})\n"
    )
    found = []
    for number, rule in enumerate(("> 0", "> 0", "> 1000")):
        file = tmp_path / str(number) / "own.py"
        file.parent.mkdir()
        file.write_text(code.format(rule))
        spec = importlib.util.spec_from_file_location(f"own{number}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(identity, "TOKENIZERS", {"Own": module.Own})
        monkeypatch.setattr(identity, "build_tokenizer", lambda config, size, made=module.Own: made())
        found.append(identity.identity_of(TokenizerConfig("Own"), None))
    assert found[0] == found[1] and found[0]["files"] != found[2]["files"] and found[0]["ids"] != found[2]["ids"]


def source_names(rank: int, world_size: int, data: list[str]) -> set[str]:
    """Return the set of source names among the first eight samples of a run."""
    model = TINY.replace("--mock-data", "--tokenizer-type ByteTokenizer --split 1,0,0").replace("50", "257").split()
    with running([*model, "--data-path", *data], rank, world_size) as run:
        return {run.data.train.dataset.origin(number).partition(":")[0] for number in range(8)}


def test_origins_name_the_source_of_the_flags(tmp_path: Path) -> None:
    """The origin of a sample is the text file, because the tokenized data sets of all text files have the same name.
    Source names are unique."""
    for name in ("one/a.jsonl", "two/a.jsonl", "b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines(["x" * 90] * 9))
    paths = [tmp_path / name for name in ("one/a.jsonl", "two/a.jsonl", "b.txt")]
    blend = [str(word) for path in paths for word in (1, path)]
    assert run_world(1, source_names, blend) == [{"a.jsonl", "a.jsonl-2", "b.txt"}]
    assert run_world(1, source_names, [str(paths[2])]) == [{"b.txt"}]


def test_each_data_set_may_have_its_own_text_key(tmp_path: Path) -> None:
    row = '{"text": "plain", "body": "of a body", "a=b": "of a sign"}\n'
    for name in ("a.jsonl", "b.jsonl", "date=1/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(row)
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "date=1/c.jsonl"))
    keys = ("body", f"{b}=text", f"{c}=a=b")
    found = [IndexedDataset(tokenized(path, text_key=keys))[0].tolist()[:-1] for path in (a, b, c)]
    assert found == [list(b"of a body"), list(b"plain"), list(b"of a sign")]
    with pytest.raises(ValueError, match=r"no key 'nope' \(--text-key\); the keys are 'text', 'body', 'a=b'"):
        tokenized(a, text_key=("body", f"{a}=nope"))
    flags = f"--tokenizer-type ByteTokenizer --vocab-size 257 --data-path 1 {a} 1 {b} "
    for words, said in {
        f"{b}=text": "",
        f"body {b}=text {c}=text": "",
        "text body": f"--text-key text body: a record has one document.*set the other keys as .*{b}=body",
        f"{tmp_path}/d.jsonl=text": f"there is no data set {tmp_path}/d.jsonl; the data sets of the run are {a}, {b}",
        f"{b}=": "names no key; write PATH=KEY",
    }.items():
        for name in ("--text-key", "--json-keys"):
            told = "\n".join(problems(f"{flags} {name} {words}", base=BASE.replace("--mock-data", "")))
            assert re.search(said or "^$", told), words


def test_tools_accept_both_names_of_the_text_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    for name in ("--json-keys", "--text-key"):
        flags = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / name), name, "body"]
        assert preprocess([*flags, "--tokenizer-type", "ByteTokenizer"]) == 0
        assert IndexedDataset(f"{tmp_path / name}_body_document")[0].tolist() == list(b"one")


def test_steps_of_a_sample_log_can_be_decoded(tmp_path: Path) -> None:
    for name in ("one/a.jsonl", "two/a.jsonl"):
        (tmp_path / name).parent.mkdir()
        texts = [f"{number} of {name}" * (number % 3 + 1) for number in range(20)]
        (tmp_path / name).write_bytes(json_lines(texts))
    data = ["1", str(tmp_path / "one/a.jsonl"), "2", str(tmp_path / "two/a.jsonl")]
    log, expected = run_world(1, logged_run, data, str(tmp_path / "s.jsonl"))[0]
    tool = ("tools/inspect_dataset.py", "--sample-log", log, "--tokenizer-type", "ByteTokenizer", "--data-path")
    lines = run_program(*tool, *data, "--step", "2", code=0).stdout.splitlines()
    assert lines[0] == "step 2: samples 4 to 7"
    found: list[str] = []
    for line in lines[1:]:
        if line.startswith("sample "):
            found.append("")
        elif line.startswith("    "):
            found[-1] += ast.literal_eval(line.strip())
    assert found == expected and not any("not the tokens" in line for line in lines)
    swapped = [data[0], data[3], data[2], data[1]]
    assert "these are not the tokens that were trained on" in run_program(*tool, *swapped, "--step", "2", code=0).stdout
    mistakes = {
        (*data, "--step", "9"): "--step 9: .*s.jsonl has no such step; it has steps 1 to 2",
        tuple(data): "--sample-log needs --step",
        (data[1], "--step", "2"): "the log names the data set a.jsonl-2, but the given ones are a.jsonl; give all",
    }
    for flags, said in mistakes.items():
        assert re.search(said, run_program(*tool, *flags, code=2).stderr)


def test_samples_without_documents_are_named(tmp_path: Path) -> None:
    record = {"iteration": 2, "samples": [0, 0], "origins": ["stream:0+0"], "documents": [[]], "crc32": ["0"]}
    (tmp_path / "s.jsonl").write_text(json.dumps(record))
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"]))
    asks = ["--sample-log", str(tmp_path / "s.jsonl"), "--step", "2"]
    tokens = ["--tokenizer-type", "ByteTokenizer", "--data-path", str(tmp_path / "a.jsonl")]
    for argv in (asks, [*asks, *tokens]):
        with pytest.raises(ValueError, match="another --dataset-type made them, so they cannot be decoded"):
            inspect_dataset.main(argv)


def logged_run(rank: int, world_size: int, data: list[str], log: str) -> tuple[str, list[str]]:
    """Train two steps, and return the sample log and the texts of the second step's samples."""
    model = TINY.replace("--mock-data", "--tokenizer-type ByteTokenizer --split 1,0,0").replace("50", "257").split()
    with ExitStack() as resources:
        argv = [*model, "--seq-length", "32", "--train-iters", "2", "--sample-log", log, "--data-path", *data]
        run = resources.enter_context(running(argv, rank, world_size))
        start_run(run, resources)
        train(run)
        texts = [run.data.train.dataset.text(number).tolist() for number in range(4, 8)]
    return log, [bytes(token for token in text if token < 256).decode() for text in texts]


def test_documents_of_text_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one", "two", "three"]))
    tool = ("tools/inspect_dataset.py", tmp_path / "a.jsonl", "--document")
    done = run_program(*tool, 2, 0, "--tokenizer-type", "ByteTokenizer", code=0)
    assert done.stdout.endswith("  document 2, 6 tokens\n    'three'\n  document 0, 4 tokens\n    'one'\n")
    done = run_program(*tool, 3, "--tokenizer-type", "ByteTokenizer", code=2)
    assert "--document 3: " in done.stderr and "has documents 0 to 2; choose one of them" in done.stderr
    assert "a.jsonl is text; give the prefix" in run_program(*tool, 0, code=2).stderr


def test_the_epochs_of_each_source_are_printed(written: str) -> None:
    config, tokens = DatasetConfig(data_path=("3", written, "1", "nothing"), split="80,20,0"), sum(map(len, TEXTS))
    lines = list(source_lines(config, 400, 64))
    size = IndexedDataset(written).num_tokens
    epochs = 400 * 0.75 * 64 / (size * 0.8)
    assert size > tokens
    assert lines[0] == f"{written}: 45 documents, {size:,} tokens; {epochs:.3g} epochs of the 80 % for training"
    assert "there is no file nothing.idx" in lines[1] and len(lines) == 2
    assert list(source_lines(DatasetConfig(mock_data=True), 400, 64)) == []


def test_bad_records_end_a_run_unless_skipping_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\nnope\n{"text": "two"}\n')
    said = r"1 records cannot be read, but --max-bad-lines allows 0.*\n.*a\.jsonl:2: not JSON"
    with pytest.raises(ValueError, match=said):
        tokenized(str(path))
    assert not list((tmp_path / "cache" / "tokenized").glob("a-*"))
    assert len(IndexedDataset(tokenized(str(path), max_bad_lines=1))) == 2
    with pytest.raises(ValueError, match=said):  # the error is the same if the run itself tokenizes the text
        tokenized(str(path))


def test_text_files_are_recognized_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kind(tmp_path, "a.jsonl b/c/text.jsonl.gz d/.hidden.txt T.TXT other.gz", "a.jsonl", "text")
    for name, kind in {"b": "text", "d": "folder", "T.TXT": "text", "*.txt": "text", "other.gz": "file"}.items():
        check_kind(tmp_path, "", name, kind)
    # replaced because it would access the object store
    monkeypatch.setattr("megatron.core.dist_checkpointing.path_kind._is_dataset", lambda path: False)
    assert data_kind_of(tmp_path / "b") is data_kind_of("s3://bucket/folder") is TEXT and data_kind_of("none") is None
    assert "--data-path and tools/preprocess_data.py take text" in refusal("corpus.jsonl", "give a checkpoint")


def test_tools_and_plans_recognize_text(tmp_path: Path) -> None:
    text, more = tmp_path / "x.jsonl", "--dry-run --vocab-size 1000 --tokenizer-type ByteTokenizer --data-path"
    done = run_program("pretrain_gpt.py", *TINY.replace("--mock-data", "").split(), *more.split(), text, code=2)
    assert f"--data-path {text}: there is no such file; the path is relative to" in done.stderr
    text.write_text("")
    done = run_program("tools/inspect_checkpoint.py", text)
    assert done.returncode and "x.jsonl is text; give a checkpoint" in done.stdout + done.stderr


@pytest.mark.grid("seed", [7], range(30))
def test_damage_is_reported_or_harmless(seed: int, tmp_path: Path) -> None:
    """For each kind of input, the test damages one file."""
    (tmp_path / "made").mkdir()
    found = [
        run_trial(trial, Random(f"{seed} {number}"), tmp_path / f"damaged-{number}")
        for number, trial in enumerate(trials(tmp_path / "made"))
    ]
    counts = Counter(kind for kind, _ in found)
    assert not counts["failed"], [wrong for _, wrong in found if wrong]
    assert min(counts["told"], counts["read"]) > 3
