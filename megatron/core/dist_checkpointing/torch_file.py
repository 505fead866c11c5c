"""Reads files of torch.save that may come from anyone: plain tensors and values, and no more memory than the file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from megatron.core.dist_checkpointing.pickle_calls import check_calls
from megatron.core.dist_checkpointing.pickle_rules import Refused
from megatron.core.torch_private import archive_reader

ZIP = b"PK\x03\x04"
PICKLES = 5
"""Pickles at the beginning of a file of the older format, before the bytes of its tensors."""


def load_torch_file(path: Path, permitted: Sequence[Any] = ()) -> Any:
    """Reads a file with `weights_only`, onto the CPU, mapped into memory where its format allows.

    `permitted` are classes and functions, or pairs of one with its name, that a file may name beside those of torch;
    their calls must allocate nothing by a number. Raises pickle.UnpicklingError for a file that asks for anything else,
    or for more memory than its size, and many other exceptions for a damaged one.
    """
    names = [each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in permitted]
    with path.open("rb") as file:
        zipped = check_torch_file(file, names)
    with torch.serialization.safe_globals(list(permitted)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def check_torch_file(file: IO[bytes], permitted: Sequence[str] = ()) -> bool:
    """Checks what a seekable file from its beginning would make torch.load do; leaves it there.

    Returns whether it is of the zip format. Raises pickle.UnpicklingError for calls that would allocate more than the
    file holds, and for a damaged pickle. A damaged zip file is left to torch.
    """
    size = file.seek(0, 2)
    file.seek(0)
    zipped = file.read(len(ZIP)) == ZIP
    file.seek(0)
    if zipped:
        data = _pickle_of(file, size)
        if data is not None:
            check_calls(data, size, permitted)
    elif size:
        _check_older(file, size, permitted)
    file.seek(0)
    return zipped


def _pickle_of(file: IO[bytes], size: int) -> bytes | None:
    """The pickle of a zip file; None if it cannot be found. torch's own reader is used, as others may see another one.
    No record is compressed, so that they are not larger than the file."""
    try:
        reader = archive_reader(file)
        records = sum(reader.get_record_size(name) for name in reader.get_all_records())
        if records > size:
            raise Refused(f"it states records of {records:,} bytes, and has {size:,}")
        return reader.get_record("data.pkl")
    except RuntimeError:
        return None


def _check_older(file: IO[bytes], size: int, permitted: Sequence[str]) -> None:
    try:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, AttributeError):  # no file of the system
        check_calls(file.read(), size, permitted, PICKLES)
        return
    with mapped:
        check_calls(mapped, size, permitted, PICKLES)
