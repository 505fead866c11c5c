"""Tests of the datasets of a run: the contents of samples, errors, shares of documents, and index files that several
processes use."""

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets import indices
from megatron.core.datasets.build import Demands, build_datasets, parse_blend, split_share
from megatron.core.datasets.index_cache import IndexCache, array_digest
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.source_order import split_tokens
from tests.corpus import largest_file, write_documents

FOLDER = Path(__file__).parents[1] / "fixtures" / "megatron_order"
ALPHA = str(FOLDER / "alpha")


def build(sizes=(4, 0, 0), seq_length=16, eod=None, vocab_size=None, **kwargs):
    config = DatasetConfig(**({"data_path": (ALPHA,), "split": "1,0,0"} | kwargs))
    return build_datasets(config, seq_length=seq_length, seed=5, sizes=sizes, eod=eod, vocab_size=vocab_size)


# Tests of the contents of a sample


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_positions_attention_and_loss_restart_after_each_end_of_document(tokens):
    text = np.array(tokens)
    format = SampleFormat(len(text) - 1, eod=0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    sample = format.sample(text)
    positions, documents, position, document = [], [], 0, 0
    for token in tokens[:-1]:
        positions.append(position)
        documents.append(document)
        position += 1
        if token == 0:
            position, document = 0, document + 1
    assert (sample["tokens"].tolist(), sample["labels"].tolist()) == (tokens[:-1], tokens[1:])
    assert sample["loss_mask"].tolist() == [float(token != 0) for token in tokens[:-1]]
    assert sample["position_ids"].tolist() == positions
    assert sample["document_ids"].tolist() == documents


@pytest.mark.parametrize("flag", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_switches_without_an_end_of_document_token_are_refused(flag):
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: needs an end-of-document token"):
        build(**{flag: True})


# Mistakes


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"split": "969,30,1", "sizes": (1, 1, 1), "seq_length": 1000},
            r"--split 969,30,1: the 60 documents of .*alpha are too few to divide, and their 2420 tokens too few for a "
            r"sample of --seq-length 1000 \+ 1 in each of train and valid and test; shorten the sequence",
        ),
        ({"split": "0,0,0"}, "--split 0,0,0: must be up to three shares"),
        ({"split": "90,20,-10"}, "none negative"),
        ({"data_path": ("/no/such/prefix",)}, "there is no file /no/such/prefix.idx"),
        ({"data_path": (ALPHA, "0.5", ALPHA, "0.5")}, "must be the weight of '0.5'"),
        ({"data_path": ("0", ALPHA, "1", ALPHA)}, "weight 0 must be positive"),
        ({"data_path": ("nan", ALPHA)}, "weight nan must be positive"),
        ({"data_path": ("1", ALPHA), "sizes": (None, 0, 0)}, "by weight, so it has no epochs"),
        (
            {"seq_length": 10**6, "sizes": (None, 0, 0)},
            r"have 2420 tokens, too few for one sample of --seq-length 1000000",
        ),
        ({"vocab_size": 300}, r"alpha has token id \d+, outside the vocabulary of 300"),
    ],
)
def test_mistakes_are_named(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=re.compile(message)):
        build(**({"data_cache_path": str(tmp_path)} | kwargs))


def test_all_missing_files_are_named_at_once():
    with pytest.raises(ValueError, match=r"no/a\.idx") as caught:
        build(data_path=("/no/a", "/no/b"), split="9,1,0", sizes=(4, 4, 0))
    assert len(str(caught.value).split("\n")) == 2 and "/no/b.idx" in str(caught.value)


def test_splits_without_requested_samples_are_not_built(tmp_path):
    assert build(split="969,30,1", sizes=(4, 1, 0), data_cache_path=str(tmp_path)).test is None


def test_a_single_document_is_divided_over_the_needed_splits(tmp_path):
    book, said = write_documents(tmp_path / "book", [np.arange(5000)]), []
    demands = Demands(say=said.append)
    build = partial(build_datasets, DatasetConfig(data_path=(book,)), seq_length=64, seed=5, demands=demands)
    splits = build(sizes=(100, 4, 4))
    seen = [set(np.concatenate([each.text(i) for i in range(len(each))]).tolist()) for each in splits]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
    assert [max(each) for each in seen] == [4784, 4934, 4999] and len(splits[2]) == 4
    assert said == [
        f"{book}: 1 documents are too few for --split 969,30,1; dividing the tokens of all documents instead: "
        "train 4,785, valid 150, test 65"
    ]
    assert len(build(sizes=(None, 0, 0)).train) == 4999 // 64, "the whole document if no other split is needed"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 7))
def test_each_token_belongs_to_one_split(lengths, block, wanted):
    needed = [bool(wanted & bit) for bit in (1, 2, 4)]
    parts = split_tokens(np.array(lengths), (0.9, 0.07, 0.03), needed, block)
    if parts is None:
        assert sum(lengths) < block * sum(needed) + 3, "refused only if there are fewer blocks than splits"
        return
    rows = [row for part in parts for row in zip(part.documents, part.starts, part.lengths, strict=True)]
    found = [(document, token) for document, start, size in rows for token in range(start, start + size)]
    assert found == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    assert all(part.tokens >= block for part, need in zip(parts, needed, strict=True) if need)


def test_a_set_smaller_than_a_sample_is_repeated(tmp_path):
    train = build(data_path=(write_documents(tmp_path / "x", [[1, 2, 3], [4]]),), sizes=(5, 0, 0), seq_length=6).train
    assert len(train) >= 5 and sorted(train.text(0).tolist() + train.text(1).tolist())[0] == 1


def test_an_id_outside_the_vocabulary_is_detected_when_read(tmp_path):
    """The invalid token id occurs so rarely that the check of a few samples at startup does not find it."""
    documents = [[1] * 400_000, [2] * 3, [-5], [1] * 400_000]
    prefix = write_documents(tmp_path / "x", documents, "<i4")
    train = build(data_path=(prefix,), seq_length=1000, sizes=(None, 0, 0), vocab_size=100).train
    with pytest.raises(ValueError, match="has token id -5, outside the vocabulary of 100"):
        _ = [train[i] for i in range(len(train))]


@pytest.mark.parametrize(
    ("documents", "dtype", "message"),
    [([np.ones(50, "<f4")], "<f4", "holds float32, not token ids"), ([], "<u2", "has no documents")],
)
def test_a_dataset_that_holds_no_tokens_is_refused(tmp_path, documents, dtype, message):
    with pytest.raises(ValueError, match=message):
        build(data_path=(write_documents(tmp_path / "x", documents, dtype),))


def test_prefixes_may_have_a_suffix_and_need_no_weights():
    assert parse_blend("--data-path", ["a.bin", "b.idx"]) == (["a", "b"], None)
    assert parse_blend("--data-path", ["3", "a", "1e0", "b"]) == (["a", "b"], [3.0, 1.0])
    assert parse_blend("--data-path", ["7"]) == (["7"], None)


# Index files


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


def test_index_files_are_reused_and_named_by_content(tmp_path):
    cache = str(tmp_path / "cache")
    build(data_cache_path=cache)
    first = files(cache)
    assert len(first) == 4 and all("GPTDataset-train" in name for name in first)
    build(data_cache_path=cache)
    assert files(cache) == first
    copy = write_documents(tmp_path / "copy", [[1] * 30])
    build(data_path=(copy,), data_cache_path=cache)
    assert len(files(cache)) == 8
    # The dataset has the same name but different data, so the old index must not be used.
    write_documents(tmp_path / "copy", [[1] * 90])
    assert build(data_path=(copy,), data_cache_path=cache).train.text(3).tolist() == [1] * 17


@pytest.mark.parametrize("left", [100, 0])
def test_a_damaged_index_file_is_rebuilt(tmp_path, left):
    expected = build(data_cache_path=str(tmp_path)).train.text(0).tolist()
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:left])
    assert build(data_cache_path=str(tmp_path)).train.text(0).tolist() == expected


def raised(file):
    """Return the content of an index file in which the first 16 values are increased by one."""
    array = np.load(file, mmap_mode="r")
    changed = bytearray(file.read_bytes())
    changed[array.offset : array.offset + array[:16].nbytes] = (array[:16] + 1).astype(array.dtype).tobytes()
    return changed


CHANGES = {
    "one bit": lambda file: bytes([*file.read_bytes()[:150], file.read_bytes()[150] ^ 1, *file.read_bytes()[151:]]),
    "no checksum": lambda file: file.read_bytes()[:-15],
    "a part of the checksum": lambda file: file.read_bytes()[:-1],
    "a longer file": lambda file: file.read_bytes() + b"\0",
}
CHANGED = [("shuffle_index", change) for change in CHANGES.values()]
CHANGED += [(name, raised) for name in ("document_index", "sample_index", "shuffle_index", "dataset", "sample")]


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_a_changed_index_file_is_rebuilt(tmp_path, caplog, name, change):
    data = ("1", write_documents(tmp_path / "x", [[n] * 9 for n in range(40)]))
    drawn = {"data_path": data, "data_cache_path": str(tmp_path / "cache"), "sizes": (30, 0, 0)}
    train = build(**drawn).train
    expected = [train.text(n).tolist() for n in range(30)]
    (path,) = (tmp_path / "cache").glob(f"*-{name}.npy")
    written = path.read_bytes()
    path.write_bytes(change(path))
    assert path.read_bytes() != written
    train = build(**drawn).train
    assert [train.text(n).tolist() for n in range(30)] == expected and path.read_bytes() == written
    assert caplog.text.count(f"index file {path}: it has") == 1 and "building it again" in caplog.text


def test_many_samples_of_a_document_share_rows(tmp_path, monkeypatch):
    """A compact index gives the same samples as an index with one row per sample. The values that a resumed run
    compares with its checkpoint are also the same."""
    data = ("1", write_documents(tmp_path / "x", [list(range(n, n + 200)) for n in range(7)]))
    found = {}
    for many in (indices.MANY_SAMPLES, 10**9):
        monkeypatch.setattr(indices, "MANY_SAMPLES", many)
        train = build(data_path=data, data_cache_path=str(tmp_path / f"cache {many}"), sizes=(900, 0, 0)).train
        found[many] = train.fingerprint, [train.text(n).tolist() for n in range(900)]
        (path,) = (tmp_path / f"cache {many}").rglob("*-sample_index.npy")
        rows = np.load(path).size
        assert rows < 900 // many if many < 10**9 else rows > 2 * 900
    assert len(set(map(str, found.values()))) == 1


def test_an_index_names_its_sources(tmp_path):
    prefix = write_documents(tmp_path / "x", [[1] * 90])
    build(data_path=(prefix,))
    (text,) = (tmp_path / "cache" / "GPTDataset_indices").glob("*-description.txt")
    assert json.loads(text.read_text())["made_from"] == [f"{prefix}.idx"]


def test_a_disk_that_gets_full_leaves_no_partial_file(tmp_path):
    array = np.zeros(((1 << 20) + 100) // 4, np.int32)
    message = r"index files cannot be written .*use a folder that .* has free space"
    with largest_file(1 << 20), pytest.raises(ValueError, match=message):
        IndexCache(str(tmp_path), "").arrays(["zeros"], "full", {"what": "full"}, lambda: [array])
    assert not list(tmp_path.glob("*.npy")) and not list(tmp_path.glob(".*.tmp"))


def test_indices_are_saved_with_the_data_by_default(tmp_path):
    prefix = write_documents(tmp_path / "x", [[1] * 90])
    build(data_path=(prefix,))
    assert len(list((tmp_path / "cache" / "GPTDataset_indices").glob("*.npy"))) == 3


@pytest.fixture
def unwritable(tmp_path):
    """Return a dataset prefix whose folder contains a file named `cache`. Because of this file, not even root can
    create a folder with this name."""
    prefix = write_documents(tmp_path / "x", [[1] * 90])
    (tmp_path / "cache").write_text("")
    return prefix


def test_indices_stay_in_memory_if_they_cannot_be_written(unwritable, caplog):
    assert build(data_path=(unwritable,)).train.text(0).tolist() == [1] * 17
    assert "in memory" in caplog.text and "--data-cache-path FOLDER" in caplog.text


def test_a_requested_cache_must_be_writable(unwritable):
    folder = str(Path(unwritable).parent / "cache" / "here")
    with pytest.raises(ValueError, match=f"--data-cache-path {folder}: index files cannot be written"):
        build(data_path=(unwritable,), data_cache_path=folder)


def test_a_read_only_folder_serves_its_index_files(tmp_path, caplog, monkeypatch):
    prefix = write_documents(tmp_path / "x", [[1] * 90])
    build(data_path=(prefix,))
    monkeypatch.setattr(os, "access", lambda *_: False)
    build(data_path=(prefix,))
    assert "memory" not in caplog.text
    build(data_path=(prefix,), seq_length=8)
    assert "in memory" in caplog.text


def test_processes_without_locks_leave_complete_files(tmp_path, monkeypatch):
    """On a network disk without locks, every process builds the index, and the last rename wins."""
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    test_index_files_are_reused_and_named_by_content(tmp_path)


def test_a_digest_sees_every_value():
    array = np.zeros(2**22 + 10, np.int32)
    before = array_digest(array)
    array[-1] = 1
    assert array_digest(array) != before == array_digest(np.zeros(2**22 + 10, np.int32))


# Made-up data


def test_mock_data_are_the_same_everywhere_and_differ_by_sample_split_and_seed():
    def texts(seed, split):
        datasets = build_datasets(
            DatasetConfig(mock_data=True), seq_length=32, seed=seed, sizes=(5, 5, 5), eod=7, vocab_size=50
        )
        return [datasets[split].text(i).tolist() for i in range(5)]

    assert texts(1, 0) == texts(1, 0)
    every = texts(1, 0) + texts(1, 1) + texts(2, 0)
    assert len({tuple(text) for text in every}) == len(every)
    assert all(0 <= token < 50 for text in every for token in text)


@pytest.mark.parametrize(("vocab_size", "eod"), [(2, 1), (3, None), (257, 256), (50_000, 2), (None, None)])
def test_mock_tokens_stay_in_the_vocabulary_and_can_be_learnt(vocab_size, eod):
    """The most frequent successor of each token is counted in one half of the data, and predicts most tokens of the
    other half."""
    train = build(
        mock_data=True, data_path=None, sizes=(200, 0, 0), seq_length=128, vocab_size=vocab_size, eod=eod
    ).train
    texts = np.stack([train.text(i) for i in range(200)])
    assert texts.min() >= 0 and texts.max() < (vocab_size or 128)
    if eod is not None:
        assert 0 < (texts == eod).mean() < 0.02
    size = int(texts.max()) + 1
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (texts[:100, :-1], texts[:100, 1:]), 1)
    guess = counts.argmax(1)
    assert (guess[texts[100:, :-1]] == texts[100:, 1:]).mean() > 0.85


def test_a_share_of_the_documents_can_be_used(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", [[number] * 8 for number in range(10)])
    sizes = (None, None, None)
    data = DatasetConfig(train_data_path=(f"{prefix}@0:0.6",), valid_data_path=(f"{prefix}@0.6:1",))
    found = build_datasets(data, seq_length=4, seed=1, sizes=sizes)
    assert found.train is not None and found.valid is not None
    tokens = [{int(t) for n in range(len(each)) for t in each[n]["tokens"]} for each in (found.train, found.valid)]
    assert tokens[0] <= set(range(6)) and tokens[1] <= set(range(6, 10)) and all(tokens)
    assert split_share("a.b") == ("a.b", None)
    with pytest.raises(ValueError, match="0 <= START < END <= 1"):
        split_share("a@0.5:0.5")
    with pytest.raises(ValueError, match="cannot be divided by --split"):
        build_datasets(DatasetConfig(data_path=(f"{prefix}@0:0.5",)), seq_length=4, seed=1, sizes=sizes)
