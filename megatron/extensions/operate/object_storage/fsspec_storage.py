"""Object storage, accessed with fsspec. This module does not import torch.

The class `Storage` describes how folders are written. A folder contains the file `.unfinished` until all other files
are written. The manifest is written last. Writing a folder therefore does not require renames, and readers never see a
folder whose upload was interrupted. Each request has a time limit and is retried if it fails (`limits`). Credentials
are read from the environment, or from the configuration files of the store's command-line tools.

On S3, objects are uploaded in parts from memory. Objects are replaced conditionally: a replacement fails if another
process has changed the object (`s3_requests`). On other stores, each object is uploaded from a temporary file. On these
stores, objects are replaced conditionally only if the fsspec package of the store supports conditional writes.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, TypeVar, cast

from megatron.core.dist_checkpointing.file_storage import Storage
from megatron.core.dist_checkpointing.ranged_file import Range, RangedFile
from megatron.extensions.operate.object_storage.block_cache import CACHE, Stored
from megatron.extensions.operate.object_storage.limits import LIMITS
from megatron.extensions.operate.object_storage.s3_requests import S3, Parts, is_precondition
from megatron.extensions.operate.object_storage.versioned_writes import replace_seen
from megatron.training.reliability.visible_text import visible

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

S3_SCHEMES = ("s3", "s3a", "r2")

SMALLEST_COPY = 5 << 20
"""Minimum size in bytes of an object that S3 can copy into a multipart upload."""


class FsspecStorage(Storage):
    """Storage for all URLs of one scheme, such as s3. Each forked process opens its own connections."""

    read_ahead = 16 << 20

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self._process, self._opened = 0, cast("AbstractFileSystem | None", None)
        self._told = False
        self._known: dict[PurePath, Stored] = {}

    def names(self, folder: PurePath) -> list[str]:
        place = self._place(folder)

        def listed(attempt: int) -> list[str]:
            try:
                found = self._fs.ls(place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            paths = [str(path).strip("/") for path in found]
            return sorted({path.rpartition("/")[2] for path in paths if path.rpartition("/")[0] == place})

        return LIMITS.tried(folder, listed)

    def size(self, path: PurePath) -> int | None:
        def measured(attempt: int) -> int | None:
            try:
                about = self._fs.info(self._place(path))
            except FileNotFoundError:
                return None
            return int(about["size"]) if about["type"] == "file" else None

        return LIMITS.tried(path, measured)

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        if length == 0:
            return b""

        def fetched(attempt: int) -> bytes:
            LIMITS.move(length or 0)
            data = self._fs.cat_file(self._place(path), start=start or None, end=end)
            LIMITS.count(read=len(data))
            return bytes(data)

        try:
            return LIMITS.tried(path, fetched)
        except FileNotFoundError:
            raise
        except OSError:
            if start and start >= (self.size(path) or 0):  # stores refuse a range beyond the end of the object
                return b""
            raise

    def read_shared(self, path: PurePath, start: int, length: int) -> bytes:
        """Read a range of a file through the cache that all processes of this host share. Raises FileExistsError if the
        file was replaced after this process began to read the file. On stores other than S3, a replacement may remain
        undetected."""
        return CACHE.read(self.unchanging(path), start, length)

    def open(self, path: PurePath) -> IO[bytes]:
        return self.open_ranges(path, [Range(0, sys.maxsize)]) if self._keeps(path) else super().open(path)

    def open_ranges(self, path: PurePath, ranges: Iterable[Range]) -> IO[bytes]:
        """Open a checkpoint file from which the given ranges will be read. If --storage-cache is set, the ranges are
        read through the cache that all processes of this host share."""
        if not self._keeps(path):
            return super().open_ranges(path, ranges)
        self._known.pop(path, None)  # another checkpoint of the same iteration may have replaced this one
        stored = self.unchanging(path)
        read = partial(CACHE.read_kept, stored)
        return cast("IO[bytes]", RangedFile(read, stored.size, ranges, self.read_ahead))

    def _keeps(self, path: PurePath) -> bool:
        return CACHE.keeps_checkpoints and path.suffix == ".distcp"

    def local_file(self, path: PurePath) -> Path:
        return CACHE.whole(self.unchanging(path))

    def cache_folder(self, path: PurePath) -> Path:
        return CACHE.folder

    def unchanging(self, path: PurePath) -> Stored:
        if (known := self._known.get(path)) is None:
            size, s3 = self._known_size(path), self._s3
            tag = None if s3 is None else LIMITS.tried(path, lambda attempt: s3.tag(path))
            identity = LIMITS.tried(path, lambda attempt: str(self._fs.ukey(self._place(path))))
            known = self._known[path] = Stored(str(path), identity, size, partial(self._exactly, path, tag))
        return known

    def _exactly(self, path: PurePath, tag: str | None, start: int, length: int) -> bytes:
        """Read a range of an object. On S3, `tag` is the ETag of the expected content: the object must still have this
        ETag. On other stores, `tag` is None."""
        data = self.read(path, start, length) if tag is None else self._read_tagged(path, tag, start, length)
        if len(data) != length:
            raise OSError(f"{path}: requested bytes {start} to {start + length}, received {len(data)}")
        return data

    def _read_tagged(self, path: PurePath, tag: str, start: int, length: int) -> bytes:
        def fetched(attempt: int) -> bytes:
            LIMITS.move(length)
            s3 = self._s3
            assert s3 is not None
            data = s3.read(path, start, length, tag)
            LIMITS.count(read=len(data))
            return data

        return LIMITS.tried(path, fetched) if length else b""

    def write(self, path: PurePath, data: bytes) -> None:
        if len(data) > LIMITS.part_bytes:
            with self.create(path) as file:
                file.write(data)
            return

        def put(attempt: int) -> None:
            LIMITS.move(len(data))
            self._fs.pipe_file(self._place(path), data, **LIMITS.within(self._fs, len(data)))
            LIMITS.count(written=len(data))

        LIMITS.tried(path, put)

    def remove(self, path: PurePath) -> None:
        self._remove(path, self._place(path))

    def _remove(self, path: PurePath, place: str) -> None:
        """Remove the object or folder at `place`. Error messages contain `path` as the name of the object."""

        def removed(attempt: int) -> None:
            try:
                self._remove_all(place)
            except FileNotFoundError:
                if not attempt:  # if this is a retry, the first request has removed the object
                    raise

        LIMITS.tried(path, removed)

    def _remove_all(self, place: str) -> None:
        """Remove an object or a folder. This method does not use fsspec's `rm`, because `rm` would interpret `[`, `*`
        and `?` in `place` as a pattern, and remove matching objects of other runs."""
        if not set(place) & set("*?["):
            self._fs.rm(place, recursive=True)
            return
        found = self._fs.find(place)
        if not found:
            raise FileNotFoundError(f"there is no {place}")
        for name in found:
            self._fs.rm_file(name)

    def create(self, path: PurePath) -> IO[bytes]:
        if self._s3 is not None:
            parts = Parts(self._s3, path, partial(self.write, path), lambda: self.size(path))
            return cast("IO[bytes]", parts)
        return cast("IO[bytes]", _Spooled(partial(self._put_file, path)))

    def append(self, path: PurePath, data: bytes) -> None:
        """Append `data` to an object. For large objects on S3, only `data` is uploaded, and the store copies the old
        content. For small objects and on other stores, the old content is downloaded and uploaded again."""
        old = self.size(path) or 0
        if self._s3 is None or old < SMALLEST_COPY:
            super().append(path, data)
            return
        s3 = self._s3

        def appended(attempt: int) -> None:
            if not attempt or self.size(path) != old + len(data):
                s3.append(path, data)
            LIMITS.count(written=len(data))

        LIMITS.tried(path, appended)

    def replace(self, path: PurePath, data: bytes, expected: bytes | None) -> None:
        def replaced(attempt: int) -> bool:
            try:
                if self._s3 is not None:
                    return self._s3.replace(path, data, expected)
                if expected is not None:
                    return replace_seen(self._fs, self.scheme, self._place(path), data, expected)
                self._fs.pipe_file(self._place(path), data, mode="create")
            except FileExistsError:
                return False
            except Exception as error:
                if not is_precondition(error):
                    raise
                return False
            return True

        try:
            done = LIMITS.tried(path, replaced)
        except (NotImplementedError, OSError) as error:
            if not isinstance(error, NotImplementedError) and "NotImplemented" not in str(error):
                raise
            self._tell_of_races(path)
            super().replace(path, data, expected)
            return
        # if the object contains `data`, an earlier request has written it, and only the response was lost
        if not done and self.content(path) != data:
            raise FileExistsError(f"{path} was changed by another writer")

    def _tell_of_races(self, path: PurePath) -> None:
        """Print a notice that the store does not support conditional writes. The notice is printed only once."""
        if not self._told:
            self._told = True
            rule = "this store has no conditional writes, so an object is read and compared before it is replaced"
            remedy = "do not run two processes that save to one URL at the same time"
            print(visible(f"{path}: {rule}; {remedy}"), file=sys.stderr, flush=True)

    def begin(self, final: PurePath, keeps_names: bool = False) -> None:
        """Begin to write a folder. Also abort multipart uploads that were interrupted, so that the storage deletes
        their parts."""
        super().begin(final, keeps_names)
        self._abort_uploads(final)

    def _abort_uploads(self, final: PurePath) -> None:
        if self._s3 is not None:
            kind = final.with_name(final.name.partition("_")[0])
            with suppress(OSError):  # ignored, because leftover parts only take up space
                LIMITS.tried(final, partial(self._s3.abort_uploads, kind))

    def _put_file(self, path: PurePath, file: str) -> None:
        size = os.path.getsize(file)

        def put(attempt: int) -> None:
            LIMITS.move(size)
            self._fs.put_file(file, self._place(path), **LIMITS.within(self._fs, size))
            LIMITS.count(written=size)

        LIMITS.tried(path, put)

    def _place(self, path: PurePath) -> str:
        if self.scheme in S3_SCHEMES:  # fsspec's strip_protocol does not support all of these schemes
            return str(path).partition("://")[2].strip("/")
        from fsspec.core import strip_protocol  # an optional dependency

        return str(strip_protocol(str(path))).strip("/")

    @property
    def _s3(self) -> S3 | None:
        return S3(self._fs, self._place) if self.scheme in S3_SCHEMES else None

    @property
    def _fs(self) -> AbstractFileSystem:
        if self._opened is None or self._process != os.getpid():
            self._opened, self._process = connected(self.scheme), os.getpid()
        return self._opened


def connected(scheme: str) -> AbstractFileSystem:
    """Return the fsspec file system for a scheme, with fsspec's caches and retries disabled."""
    import fsspec  # an optional dependency

    options: dict[str, object] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in S3_SCHEMES:
        scheme = "s3"
        limits = {"connect_timeout": min(10.0, LIMITS.timeout_seconds), "read_timeout": LIMITS.timeout_seconds}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}, "max_pool_connections": 16}
    fs = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        fs.retries = 1
    return fs


class _Spooled(io.FileIO):
    """Temporary file that is uploaded when it is closed."""

    def __init__(self, put: Callable[[str], None]) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="upload-")
        super().__init__(descriptor, "w")
        self._put = put

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._put(self._path)
        finally:
            os.unlink(self._path)

    def discard(self) -> None:
        """Close the file without uploading it. Files that are never closed are not uploaded either."""
        super().close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    __del__ = discard
