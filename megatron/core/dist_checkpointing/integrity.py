"""Checkpoint integrity: a manifest of files with sizes and checksums, written last and read first. This module does not
import torch.

The checksums are CRC-32. A CRC-32 detects every burst error of up to 32 bits, and misses only about one in 2^32 longer
bursts. CRC-32 is the fastest checksum in the standard library (over 1 GiB/s per core). The checksum is computed while a
file is written, so that nothing is read back. The checksum protects against disk errors, but not against tampering.
"""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, cast

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import CHUNK, storage_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MANIFEST = "manifest.json"

Sums = dict[str, dict[str, int]]
"""Dictionary that maps a file name to {"bytes": size, "crc32": checksum}."""


class SummedFile(io.BufferedWriter):
    """A new file that computes the checksum of everything written to it. The file must be written sequentially. The
    file is durable once it is closed."""

    def __init__(self, path: PurePath) -> None:
        super().__init__(cast("io.RawIOBase", storage_of(path).create(path)), CHUNK)
        self.bytes = self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.bytes += written
        self.crc32 = zlib.crc32(data, self.crc32)
        return written

    def seek(self, *args: object) -> int:
        raise io.UnsupportedOperation("the checksum supports only sequential writes")

    @property
    def sums(self) -> dict[str, int]:
        return {"bytes": self.bytes, "crc32": self.crc32}


def write_summed(path: PurePath, text: str) -> dict[str, int]:
    """Write a new file in an unpublished folder. Return the size and the checksum of the file."""
    with SummedFile(path) as file:
        file.write(text.encode())
    return file.sums


def write_manifest(folder: PurePath, sums: Sums) -> None:
    """Write the manifest of a folder. The function raises OSError if a file does not have the expected size, which
    indicates a faulty disk or another writer."""
    for name, expected in sums.items():
        size = storage_of(folder).size(folder / name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / name))
        if size != expected["bytes"]:
            raise OSError(f"{folder / name} has {size} bytes after {expected['bytes']} were written")
    write_summed(folder / MANIFEST, json.dumps({"files": dict(sorted(sums.items()))}, indent=1))


def read_manifest(folder: PurePath) -> Sums:
    """Read the manifest of a checkpoint folder. The function raises ValueError with the reason if the manifest is
    missing or damaged."""
    try:
        files = parse_json(storage_of(folder).read(folder / MANIFEST).decode())["files"]
        for name, entry in files.items():
            if PurePath(name).name != name or not all(type(entry[key]) is int for key in ("bytes", "crc32")):
                raise TypeError(f"entry {name!r}")
        return files
    except FileNotFoundError:
        raise ValueError(f"there is no {MANIFEST} in it, so the save was not finished") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from None
    except (KeyError, TypeError, AttributeError, RecursionError):
        form = 'an object {"files": {name: {"bytes": number, "crc32": number}}}'
        raise ValueError(f"{MANIFEST} is damaged: it must be {form}") from None


def misfits(folder: PurePath, sums: Sums) -> list[str]:
    """Return one message for each file that is missing or has the wrong size, without reading the files."""
    return [f"{name} {misfit}" for name, expected in sums.items() if (misfit := _misfit(folder / name, expected))]


def damages(folder: PurePath, sums: Sums, names: Sequence[str]) -> list[str]:
    """Return one message for each damaged file. Files of the expected size are read completely to verify their
    checksums."""
    return [f"{name} {damage}" for name in names if (damage := _damage(folder / name, sums[name]))]


def _misfit(path: PurePath, expected: dict[str, int]) -> str | None:
    try:
        size = storage_of(path).size(path)
    except OSError as error:
        return f"cannot be read: {error}"
    if size is None:
        return "is missing"
    return f"has {size} bytes, not {expected['bytes']}" if size != expected["bytes"] else None


def _damage(path: PurePath, expected: dict[str, int]) -> str | None:
    if misfit := _misfit(path, expected):
        return misfit
    try:
        crc32 = 0
        with storage_of(path).open(path) as file:
            while data := file.read(CHUNK):
                crc32 = zlib.crc32(data, crc32)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if crc32 == expected["crc32"] else f"has checksum {crc32:08x}, not {expected['crc32']:08x}"
