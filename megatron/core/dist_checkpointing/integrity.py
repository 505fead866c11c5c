"""Checkpoint integrity: a manifest of files with sizes and checksums, written last and read first. No torch.

Checksums are CRC-32: it detects every burst error of up to 32 bits and all but one in 2^32 longer ones, and is the
fastest checksum of the standard library (over 1 GiB/s a core). It is computed while a file is written, so that nothing
is read back. It protects against disks, not against people.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.json_text import parse_json

MANIFEST = "manifest.json"
CHUNK = 1 << 20

Sums = dict[str, dict[str, int]]
"""File name -> {"bytes": size, "crc32": checksum}."""


class SummedFile(io.BufferedWriter):
    """A new file that computes the checksum of sequential writes, and is synced to disk when closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), CHUNK)
        self.bytes = self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.bytes += written
        self.crc32 = zlib.crc32(data, self.crc32)
        return written

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("the checksum is that of bytes written one after another")

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def sums(self) -> dict[str, int]:
        return {"bytes": self.bytes, "crc32": self.crc32}


def write_summed(path: Path, text: str) -> dict[str, int]:
    """Writes a file and syncs it to disk. Returns its size and checksum."""
    with SummedFile(path) as file:
        file.write(text.encode())
    return file.sums


def write_manifest(folder: Path, sums: Sums) -> None:
    """Writes the manifest of a folder. Raises OSError if a file's size is wrong: a faulty disk, or another writer."""
    for name, expected in sums.items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise OSError(f"{folder / name} has {size} bytes after {expected['bytes']} were written")
    write_summed(folder / MANIFEST, json.dumps({"files": dict(sorted(sums.items()))}, indent=1))


def read_manifest(folder: Path) -> Sums:
    """Reads the manifest of a folder. Raises ValueError with the reason if it is missing or damaged."""
    try:
        files = parse_json((folder / MANIFEST).read_text())["files"]
        for name, entry in files.items():
            if Path(name).name != name or not all(type(entry[key]) is int for key in ("bytes", "crc32")):
                raise TypeError(f"entry {name!r}")
        return files
    except FileNotFoundError:
        raise ValueError(f"there is no {MANIFEST} in it, so it was not finished") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from None
    except (KeyError, TypeError, AttributeError, RecursionError):
        form = 'an object {"files": {name: {"bytes": number, "crc32": number}}}'
        raise ValueError(f"{MANIFEST} is damaged: it must be {form}") from None


def misfits(folder: Path, sums: Sums) -> list[str]:
    """Returns one message for each file that is missing or has another size. Reads none of them."""
    return [f"{name} {misfit}" for name, expected in sums.items() if (misfit := _misfit(folder / name, expected))]


def damages(folder: Path, sums: Sums, names: Sequence[str]) -> list[str]:
    """Returns one message for each damaged file. Reads a file whole unless its size is wrong already."""
    return [f"{name} {damage}" for name in names if (damage := _damage(folder / name, sums[name]))]


def _misfit(path: Path, expected: dict[str, int]) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return f"has {size} bytes, not {expected['bytes']}" if size != expected["bytes"] else None


def _damage(path: Path, expected: dict[str, int]) -> str | None:
    if misfit := _misfit(path, expected):
        return misfit
    try:
        crc32, buffer = 0, bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc32 = zlib.crc32(memoryview(buffer)[:count], crc32)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if crc32 == expected["crc32"] else f"has checksum {crc32:08x}, not {expected['crc32']:08x}"
