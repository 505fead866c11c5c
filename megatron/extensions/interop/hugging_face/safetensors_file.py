"""Reader and writer of safetensors files. The reader validates headers and reads slices of tensors. The writer writes
one tensor at a time.

    8 bytes   length n of the header, little-endian
    n bytes   header, JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, counted from the header's end
    the rest  the elements of the tensors, row-major, without gaps

The safetensors package maps files into memory, so a process that has read a whole file keeps all of it in memory. This
module keeps in memory only the slice that it reads or the tensor that it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
"""Maximum header length in bytes of a safetensors file."""

BLOCK = 1 << 24
"""Number of bytes that are read at a time if a slice is not contiguous in the file."""


class Sliceable(Protocol):
    """Tensor in memory or on disk. Indexing with slices returns a tensor in memory."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, box: tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """Return a tensor of this shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """Tensor in a safetensors file. The tensor's data begins at byte `start` of the file."""

    path: Path
    start: int

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """Read a part of the tensor. `box` contains one slice, without a step, for each dim. If trailing dims have no
        slice, they are read completely. Raises ValueError if the file is truncated."""
        slices = [*box, *[slice(None)] * (len(self.shape) - len(box))]
        bounds = [each.indices(size)[:2] for each, size in zip(slices, self.shape, strict=True)]
        found = torch.empty([max(0, stop - start) for start, stop in bounds], dtype=self.dtype)
        if not found.numel():
            return found
        with self.path.open("rb", buffering=0) as file:
            if tuple(found.shape[1:]) == self.shape[1:]:
                self._read(file, bounds[0][0] if bounds else 0, found)
            else:
                self._read_strided(file, bounds, found)
        return found

    def _read(self, file: BinaryIO, row: int, into: Tensor) -> None:
        """Read complete rows, beginning at `row`, into a contiguous tensor."""
        file.seek(self.start + row * prod(self.shape[1:]) * self.dtype.itemsize)
        view = bytes_of(into)
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{self.path} is truncated")
            view = view[count:]

    def _read_strided(self, file: BinaryIO, bounds: Sequence[tuple[int, int]], into: Tensor) -> None:
        """Read a slice that is not contiguous in the file. Whole rows are read block by block, and the requested
        columns are copied to `into`."""
        (first, last), columns = bounds[0], tuple(slice(*each) for each in bounds[1:])
        rows = max(1, BLOCK // (prod(self.shape[1:]) * self.dtype.itemsize))
        for row in range(first, last, rows):
            block = torch.empty((min(rows, last - row), *self.shape[1:]), dtype=self.dtype)
            self._read(file, row, block)
            into[row - first : row - first + len(block)] = block[(slice(None), *columns)]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, as a view of its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return a dict of the tensors in a safetensors file, keyed by name. The values of the tensors are not read. Raises
    ValueError, with a one-line message, if the file is damaged or truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path} is not a safetensors file, or is truncated: it has {size} bytes")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read: {why}") from None
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda each: (each.start, each.nbytes)):
        if tensor.start != end:
            raise ValueError(f"{path} is damaged: the tensors in its header overlap or leave gaps")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"{path} is {'truncated' if size < end else 'damaged'}: it has {size} bytes instead of {end}")
    return found


def _sizes(name: str, listed: object) -> tuple[int, ...]:
    """Convert a list of sizes in a file header to a tuple. Raises ValueError if `listed` is not a list of non-negative
    integers."""
    found = tuple(each for each in listed if type(each) is int and each >= 0) if isinstance(listed, list) else ()
    if not isinstance(listed, list) or len(found) < len(listed):
        raise ValueError(f"{name} has a size that is not a non-negative integer")
    return found


def _entry(path: Path, name: str, entry: Mapping[str, object], base: int) -> FileTensor:
    dtype, shape = entry["dtype"], _sizes(name, entry["shape"])
    begin, end = _sizes(name, entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    tensor = FileTensor(shape, DTYPES[dtype], path, base + begin)
    if tensor.nbytes != end - begin:
        raise ValueError(f"{name} of shape {list(shape)} has {end - begin} bytes instead of {tensor.nbytes}")
    return tensor


class SafetensorsWriter:
    """Writer of a file whose tensors are added one at a time, in any order. Use the writer as a context manager.

    Raises OSError if writing fails. Every tensor in `specs` must be added before the `with` block ends, unless the
    block raises an exception. At the end of the block, the file is synced to disk.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self._path, self._specs = path, dict(specs)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        at = 0
        # Tensors with the widest elements come first, so that every tensor is aligned to its element size.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            self._starts[name] = at
            offsets = [at, at + spec.nbytes]
            header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            at += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._file = path.open("wb", buffering=0)
        self._write(0, memoryview(len(text).to_bytes(8, "little") + text))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            assert not self._starts, f"{self._path}: not written: {', '.join(self._starts)}"
            os.fsync(self._file.fileno())
        self._file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, which must have the shape and dtype in `specs`."""
        spec = self._specs[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), (name, tensor.shape, tensor.dtype, spec)
        start = self._base + self._starts.pop(name)
        if tensor.numel():
            self._write(start, bytes_of(tensor.contiguous()))

    def _write(self, start: int, view: memoryview) -> None:
        self._file.seek(start)
        while view:
            view = view[self._file.write(view) :]
