"""Test that files in the format of torch.save are refused if calls in their pickles would allocate gigabytes, even if
the pickle has only a few bytes. Files that torch itself writes are accepted."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from megatron.core.dist_checkpointing.pickle_calls import check_calls
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError, save
from megatron.core.dist_checkpointing.torch_file import check_torch_file, load_torch_file
from megatron.core.parallel_state import Axis

MANY = 1 << 29


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def call(path: str, *given: bytes) -> bytes:
    return name(path) + b"(" + b"".join(given) + b"tR"


def storage(elements: int, key: str = "0") -> bytes:
    return b"(" + text("storage") + name("torch.FloatStorage") + text(key) + text("cpu") + number(elements) + b"NtQ"


def tensor(elements: int, of: bytes) -> bytes:
    return call("torch._utils._rebuild_tensor", of, number(0), number(elements) + b"\x85", number(1) + b"\x85")


DOUBLED = "".join("c_codecs\nencode\n" for _ in range(30)).encode() + call("_codecs.encode", text("a"), text("latin1"))
LARGE = {
    "bytes by a number": call("__builtin__.bytearray", number(MANY)),
    "bytes by a flag": call("builtins.bytearray", b"\x88"),
    "bytes by an object": call("builtins.bytearray", tensor(1, storage(1))),
    "bytes by way of another call": call(
        "torch._tensor._rebuild_from_type_v2",
        name("builtins.bytearray"),
        name("torch.Tensor"),
        number(MANY) + b"\x85",
        b"N",
    ),
    "a tensor": call("torch.Tensor", number(MANY)),
    "a new tensor": name("torch.FloatTensor") + number(MANY) + b"\x85\x81",
    "an untyped storage": call("torch.storage.UntypedStorage", number(MANY)),
    "a typed storage": call("torch.storage.TypedStorage", number(MANY)),
    "a quantized tensor": call("torch._utils._rebuild_qtensor", storage(1), number(0), number(MANY) + b"\x85"),
    "a storage of the file": storage(MANY),
    "storages that share bytes": b"(" + b"".join(storage(60, str(each)) for each in range(99)) + b"t",
    "a view beyond its storage": tensor(MANY, storage(1)),
    "a state of a tensor": tensor(1, storage(1)) + b"(" + storage(1) + number(0) + number(MANY) + b"\x85\x85tb",
    "text that a codec doubles": DOUBLED + (text("hex_codec") + b"\x86R") * 30,
    "an array with a shape": call(
        "numpy.core.multiarray._reconstruct", name("numpy.ndarray"), number(MANY) + b"\x85", text("b")
    ),
    "a scalar without bytes": call("numpy.core.multiarray.scalar", call("numpy.dtype", text("V9999"))),
    "a large dtype": call("numpy.dtype", text("V999999999")),
}


def older(body: bytes) -> bytes:
    first = [pickle.dumps(each, 2) for each in (MAGIC_NUMBER, PROTOCOL_VERSION, {"little_endian": True})]
    return b"".join(first) + b"\x80\x02" + body + b"." + pickle.dumps(["0"], 2)


def zipped(body: bytes, kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


@pytest.mark.parametrize("attack", LARGE)
def test_a_call_that_allocates_by_a_number_is_refused(attack: str, tmp_path: Path) -> None:
    """Files with these calls are refused in both formats of torch.save, no matter whether they are read from memory or
    from disk."""
    for data in (zipped(LARGE[attack]), older(LARGE[attack])):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(pickle.UnpicklingError, match=r"^it (calls|asks for|states|changes|has) "):
            check_torch_file(io.BytesIO(data), ["numpy.ndarray"])
        with pytest.raises(pickle.UnpicklingError, match=r"^it (calls|asks for|states|changes|has) "):
            load_torch_file(tmp_path / "file")


def test_copies_of_one_text_are_counted() -> None:
    """The pickle contains a string once, and copies the string with calls that take eight bytes each."""
    one = b"c__builtin__\nbytearray\nh\x00h\x01\x86Rq\x02"
    body = b"(" + text("a" * 100_000) + b"q\x00" + text("latin1") + b"q\x01" + one * 20 + b"t"
    with pytest.raises(pickle.UnpicklingError, match="its calls create more than"):
        check_calls(b"\x80\x02" + body + b".", 100_000)


def test_a_compressed_record_is_refused() -> None:
    data = zipped(text("a" * (1 << 22)), zipfile.ZIP_DEFLATED)
    with pytest.raises(pickle.UnpicklingError, match=r"it states records of 4,194,\d+ bytes, and has "):
        check_torch_file(io.BytesIO(data))


@pytest.mark.parametrize(
    "data", [b"", b"N", b"\x80\x02.", b"\x80\x02h\x07.", b"\x80\x02R.", b"\x80\x05K\x01\x94."], ids=repr
)
def test_an_unreadable_pickle_is_damaged(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"it is damaged or not a torch\.save file"):
        check_calls(data + b"\x80", len(data), pickles=2)


def values() -> dict[str, Any]:
    parameter, tagged = torch.nn.Parameter(torch.randn(3)), torch.randn(3)
    parameter.kind = tagged.kind = "own"  # type: ignore[attr-defined]
    return {
        "tensors": [torch.randn(3, 4), torch.randn(4, 4)[:, 1:3].t(), torch.zeros(0, 3), torch.zeros(1).expand(5)],
        "dtypes": [torch.zeros(2).to(dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex128)],
        "parameters": OrderedDict(a=torch.nn.Parameter(torch.randn(3)), b=parameter, c=tagged),
        "plain": [b"xyz" * 999, bytearray(b"xyz"), {1, 2}, 1 + 2j, 10**30, -5, torch.Size([1, 2]), torch.device("cpu")],
        "shared": [tagged, tagged.view(3, 1)],
        "dtype": torch.bfloat16,
    }


@pytest.mark.parametrize("zip_format", [True, False])
def test_torch_files_are_accepted(zip_format: bool, tmp_path: Path) -> None:
    whole = values()
    if zip_format:  # torch cannot read these dtypes from files in the older format
        whole["further"] = [torch.zeros(4).to(torch.float8_e4m3fn), torch.zeros(4, dtype=torch.uint16)]
    torch.save(whole, tmp_path / "file", _use_new_zipfile_serialization=zip_format)
    found = load_torch_file(tmp_path / "file")
    assert found.keys() == whole.keys() and torch.equal(found["tensors"][1], whole["tensors"][1])
    assert found["plain"] == whole["plain"]


def test_numpy_arrays_are_accepted(tmp_path: Path) -> None:
    from numpy._core import multiarray

    arrays = [numpy.arange(5), numpy.zeros((2, 3), numpy.float32), numpy.array(["a", None], dtype=object)]
    torch.save({"arrays": arrays, "scalar": numpy.float64(2.5)}, tmp_path / "file")
    kinds = [type(each.dtype) for each in (*arrays, numpy.float64(1))]
    permitted: list[Any] = [numpy.ndarray, numpy.dtype, *kinds]
    for core in ("core", "_core"):
        permitted += [
            (getattr(multiarray, each), f"numpy.{core}.multiarray.{each}") for each in ("scalar", "_reconstruct")
        ]
    found = load_torch_file(tmp_path / "file", permitted)
    assert found["scalar"] == 2.5 and all(numpy.array_equal(a, b) for a, b in zip(found["arrays"], arrays, strict=True))


def test_the_tensors_of_a_checkpoint_are_checked(tmp_path: Path) -> None:
    tensors = {"model.weight": ShardedBoxes((4,), [((0,), torch.arange(4.0))])}
    folder = save(tmp_path, 1, tensors, {}, Axis())
    (data,) = folder.glob("*.distcp")
    content, attack = data.read_bytes(), zipped(LARGE["bytes by a number"])
    data.write_bytes(attack + b"\0" * (len(content) - len(attack)))
    with pytest.raises((CheckpointError, ValueError), match=r"builtins\.bytearray with something other than bytes"):
        Checkpoint(folder).read("model.weight")
