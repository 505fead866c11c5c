"""Upload of a complete checkpoint from the local disk to the --save folder. This module does not import torch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import CHUNK, MANIFEST, read_manifest, write_manifest
from megatron.core.dist_checkpointing.path_kind import LATEST, checkpoint_folder

FILES_AT_ONCE = 2


def upload(folder: Path, root: PurePath, iteration: int, check: Callable[[], None]) -> int:
    """Upload the checkpoint `folder` of an iteration to `root`, and make it the latest checkpoint in `root`. Return the
    size of the checkpoint in bytes. `check` is a function that raises OSError if this run must not write to `root`.
    Raises OSError, for example if a file differs from the manifest, and ValueError if there is no manifest. If an error
    occurs, nothing is published, and the uploaded files are deleted."""
    final = checkpoint_folder(root, iteration)
    storage, sums = storage_of(root), read_manifest(folder)
    latest = storage.content(root / LATEST)
    check()
    storage.begin(final)
    scratch = storage.scratch(final)
    try:
        with ThreadPoolExecutor(FILES_AT_ONCE, "upload of a checkpoint") as pool:
            copies = [pool.submit(_copy, folder / name, scratch / name, sums[name]) for name in sums]
            for copy in copies:
                copy.result()
        write_manifest(scratch, sums)
        check()
        storage.publish(final)
        # raises an error if another run has published a checkpoint since `latest` was read
        storage.replace(root / LATEST, str(iteration).encode(), latest)
    except BaseException:
        with suppress(OSError):
            storage.discard(final)
        raise
    return sum(entry["bytes"] for name, entry in sums.items() if name != MANIFEST)


def _copy(source: Path, target: PurePath, expected: dict[str, int]) -> None:
    crc32 = 0
    with open(source, "rb") as file:
        into = storage_of(target).create(target)
        try:
            while data := file.read(CHUNK):
                crc32 = zlib.crc32(data, crc32)
                into.write(data)
            if crc32 != expected["crc32"]:
                raise OSError(f"{source} has checksum {crc32:08x}, not {expected['crc32']:08x}")
        except BaseException:
            getattr(into, "discard", into.close)()
            raise
    into.close()
