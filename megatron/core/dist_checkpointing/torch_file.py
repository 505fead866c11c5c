"""Reader for untrusted torch.save files. The reader accepts only tensors and plain values, and limits the memory that a
file can request to a small multiple of the file's size (`pickle_calls`)."""

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
"""Number of pickles that precede the bytes of the tensors in torch.save's old file format."""


def load_torch_file(path: Path, permitted: Sequence[Any] = ()) -> Any:
    """Load a torch.save file onto the CPU with `weights_only=True`. The file is memory-mapped if its format allows
    this.

    `permitted` lists additional classes and functions to which the file may refer. If the file refers to a class or
    function under another name, pass the pair (object, name) instead of the object. A permitted function must not let
    its arguments choose how much memory it allocates. The function raises pickle.UnpicklingError if a file refers to
    other classes or functions, or requests too much memory for its size. If the file is damaged, the function may raise
    many other exceptions.
    """
    names = [each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in permitted]
    with path.open("rb") as file:
        zipped = check_torch_file(file, names)
    with torch.serialization.safe_globals(list(permitted)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def check_torch_file(file: IO[bytes], permitted: Sequence[str] = ()) -> bool:
    """Check the calls that `torch.load` would make if it loaded `file`, which must be seekable. The file must be
    positioned at its beginning. The position is restored.

    The function returns whether the file is in zip format. The function raises pickle.UnpicklingError if the calls
    would allocate too much memory for the size of the file, or if the pickle is damaged. A damaged zip file is not
    reported here, but by `torch.load`.
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
    """Return the pickle that a torch.save zip file contains, or None if it cannot be found.

    This function uses torch's own reader, because another reader may find a different pickle. Compressed records are
    rejected, so that the records cannot be larger than the file.
    """
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
    except (OSError, AttributeError):  # the stream has no file descriptor, or cannot be memory-mapped
        check_calls(file.read(), size, permitted, PICKLES)
        return
    with mapped:
        check_calls(mapped, size, permitted, PICKLES)
