"""Tests of indexed datasets. Written data can be read back, and damaged data is refused."""

import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed_dataset import DTYPES, HEADER, IndexedDataset
from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder, best_dtype
from tests.corpus import largest_file, write_documents

DOCUMENTS = [[1, 2, 3], [], [65499], list(range(200))]


@given(
    documents=st.lists(st.lists(st.integers(0, 100), max_size=20), max_size=12),
    code=st.sampled_from([code for code, dtype in DTYPES.items() if dtype.kind in "iu"]),
)
def test_written_documents_are_read_back(tmp_path_factory, documents, code):
    prefix = write_documents(tmp_path_factory.mktemp("data") / "x", documents, DTYPES[code])
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == DTYPES[code]
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in documents if d]
    assert dataset.num_documents == len(documents)
    assert dataset.num_tokens == sum(map(len, documents))
    assert dataset.verify() == []


def test_the_file_format_is_megatrons(tmp_path):
    prefix = write_documents(tmp_path / "x", [[1, 2, 3], [], [7]])
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 7)
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4) + struct.pack("<2i2q4q", 3, 1, 0, 6, 0, 1, 1, 2)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedDataset(prefix + ".bin")[1].tolist() == [7]


def test_a_batch_equals_its_documents(tmp_path):
    one = write_documents(tmp_path / "one", DOCUMENTS)
    with IndexedDatasetBuilder(str(tmp_path / "many"), np.dtype("<u2")) as builder:
        flat = np.array([token for document in DOCUMENTS for token in document])
        builder.add_documents(flat, np.array([len(document) for document in DOCUMENTS], np.int32))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"many{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes(), one


def test_documents_may_have_several_sequences(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "x"), np.dtype("<i4")) as builder:
        builder.add_document([1, 2, 3], lengths=[2, 1])
        builder.add_document([4])
    dataset = IndexedDataset(str(tmp_path / "x"))
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2], [3], [4]]
    assert dataset.document_boundaries.tolist() == [0, 2, 3]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "uint16"), (65500, "int32"), (257, "uint16")])
def test_dtype_follows_the_vocabulary(vocab_size, dtype):
    assert best_dtype(vocab_size).name == dtype


def test_an_id_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="from 3 to 70000 do not fit uint16"):
        write_documents(tmp_path / "x", [[3, 70000]])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path):
    write_documents(tmp_path / "x", [[1]])

    def fail():
        with IndexedDatasetBuilder(str(tmp_path / "x"), np.dtype("<u2")) as builder:
            builder.add_document([2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedDataset(str(tmp_path / "x"))[0].tolist() == [1]


def test_a_failed_open_leaves_no_file(tmp_path, monkeypatch):
    def opened(self, kind):
        if kind == "boundaries":
            raise KeyboardInterrupt
        return true(self, kind)

    true = IndexedDatasetBuilder._open
    monkeypatch.setattr(IndexedDatasetBuilder, "_open", opened)
    with pytest.raises(KeyboardInterrupt):
        IndexedDatasetBuilder(str(tmp_path / "x"), np.dtype("<u2"))
    assert list(tmp_path.iterdir()) == []


def test_offsets_may_exceed_2_31_bytes(tmp_path):
    """Writing and reading a sparse file of 10 GB requires offsets of more than 32 bits."""
    length, count = 2**29, 5
    builder = IndexedDatasetBuilder(str(tmp_path / "x"), np.dtype("<i4"))
    builder._data.truncate(4 * (length * count - 1))
    builder._data.seek(0, os.SEEK_END)
    builder._data.write(struct.pack("<i", 77))
    builder._lengths.write(np.full(count, length, "<i4").tobytes())
    builder._boundaries.write(np.arange(1, count + 1, dtype="<i8").tobytes())
    builder.num_sequences = builder.num_documents = count
    builder.finalize()
    dataset = IndexedDataset(str(tmp_path / "x"))
    assert dataset.offsets.tolist() == [i * 2**31 for i in range(count)] and dataset.verify() == []
    assert dataset.num_tokens == length * count
    assert dataset.get(count - 1, length - 2).tolist() == [0, 77]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda i, d: (i[:20], d), "truncated: 20 bytes, but the header has 34"),
        (lambda i, d: (i[:-1], d), r"truncated: \d+ bytes, but 3 sequences and 5 document boundaries take"),
        (lambda i, d: (i + b"\0", d), "too long"),
        (lambda i, d: (b"PK\x03\x04" + i[4:], d), "an indexed dataset starts with b'MMIDIDX"),
        (lambda i, d: (i[:9] + struct.pack("<Q", 2) + i[17:], d), "format version 2"),
        (lambda i, d: (i[:17] + b"\x09" + i[18:], d), "dtype code 9 is unknown; known codes are 1 uint8"),
        (lambda i, d: (i, d[:-2]), r"truncated: 406 bytes, but .*x.idx describes 408"),
        (lambda i, d: (i, d + d), "too long: 816 bytes"),
        (lambda i, d: (i, b""), "truncated: 0 bytes"),
        (lambda i, d: (b"", d), "truncated: 0 bytes"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    index, data = damage((tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes())
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_a_missing_file_is_named_with_what_is_there(tmp_path):
    write_documents(tmp_path / "other", DOCUMENTS)
    with pytest.raises(ValueError, match=r"there is no file .*x\.idx; .* has other"):
        IndexedDataset(str(tmp_path / "x"))
    (tmp_path / "notes.md").write_text("# Notes")
    with pytest.raises(ValueError, match=r"not an indexed dataset; text is recognized by a suffix such as \.txt"):
        IndexedDataset(str(tmp_path / "notes.md"))


def test_a_dataset_without_room_is_named_and_leaves_nothing(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "x"), np.dtype("<i4"))
    builder.add_document(np.arange(1 << 10))
    with largest_file(0), pytest.raises(OSError, match="File too large") as error, builder:
        builder.add_document(np.arange(1 << 16))
    assert error.value.filename == str(tmp_path / "x") and list(tmp_path.iterdir()) == []


def test_verify_finds_a_wrong_offset(tmp_path):
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into("<q", index, HEADER.size + 4 * 3 + 8, 4)
    (tmp_path / "x.idx").write_bytes(index)
    assert IndexedDataset(prefix).verify() == ["sequence 1 starts at byte 4, not after the one before it"]
    config = DatasetConfig(data_path=(prefix,), split="1,0,0", data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"x\.idx: damaged: sequence 1 starts at byte 4.*write or copy"):
        build_datasets(config, seq_length=2, seed=0, sizes=(1, 0, 0), eod=None, vocab_size=None)


@pytest.mark.parametrize(
    ("place", "format", "value", "message"),
    [
        (HEADER.size, "<i", 5, "sequence 1 starts at byte 6, not after the one before it"),
        (HEADER.size, "<i", -3, "sequence 0 has length -3"),
        (HEADER.size + 4 * 3, "<q", 2, "sequence 0 starts at byte 2"),
        (HEADER.size + 4 * 3 + 8, "<q", 1 << 40, "sequence 1 starts at byte 1099511627776"),
        (HEADER.size + 12 * 3 + 8, "<q", 77, "document boundaries do not run from 0 to the 3 sequences"),
    ],
)
def test_an_index_is_checked_at_every_start(tmp_path, place, format, value, message):
    """A damaged .idx file is detected even if an earlier run has cached the sample indices that were built from the
    file."""
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    config = DatasetConfig(data_path=(prefix,), split="1,0,0")
    rest = {"seq_length": 2, "seed": 0, "sizes": (1, 0, 0), "eod": None, "vocab_size": None}
    build_datasets(config, **rest)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into(format, index, place, value)
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(ValueError, match=rf"x\.idx: damaged: .*{message}.*write or copy"):
        build_datasets(config, **rest)
