"""Test that small pickles that would allocate gigabytes are refused. All pickles that Python's `pickle` module writes
are accepted."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.dcp_index import INDEX, MALFORMED
from megatron.core.dist_checkpointing.pickle_sizes import check_sizes
from megatron.core.dist_checkpointing.storage import Checkpoint

LARGE = {
    "a place in the memo": b"\x80\x04K\x01r" + struct.pack("<I", 2**28) + b".",
    "a place as text": b"K\x01p268435456\n.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "bytes": b"\x80\x03B" + struct.pack("<I", 2**31) + b".",
    "bytes of 64-bit length": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "an array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",
}


@pytest.mark.parametrize("name", LARGE)
def test_an_oversized_index_is_refused_without_allocating_it(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(LARGE[name])
    (tmp_path / "metadata.json").write_text("{}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"is not a readable checkpoint: .* (bytes|remembered values), and "):
            Checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_python_pickles_are_accepted(protocol: int) -> None:
    values = [
        None,
        True,
        -(10**400),
        2.5,
        "é" * 300,
        b"y" * 300,
        bytearray(b"z" * 300),
        {1, 2},
        frozenset("a"),
        Path("a"),
    ]
    check_sizes(pickle.dumps({"values": values, "many": [str(each) for each in range(1000)]}, protocol))


@pytest.mark.parametrize("data", [b"", b"N", b"\xfe.", b"cos\n", b"\x80\x04\x8a", b"K\x01p" + b"9" * 5000 + b"\n."])
def test_a_truncated_pickle_is_malformed(data: bytes) -> None:
    with pytest.raises(MALFORMED):
        check_sizes(data)
