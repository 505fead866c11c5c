"""Storage of a run's files: the local disk, or a URL scheme that an extension registers. This module does not import
torch.

A path object only names a file; it does not access the file. `storage_of(path)` returns the storage, which lists,
reads, writes, publishes and removes files. A `Path` is on the local disk; `located("s3://bucket/run")` is a path in the
storage registered for s3.

A folder is published as a whole. `begin` prepares the folder, files are written below `scratch`, and `publish` makes
the folder visible under its final name. On the local disk, `publish` renames the folder. Object stores cannot rename a
folder, so an object `.unfinished` marks the folder as incomplete until everything else is written.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, TYPE_CHECKING, Protocol, cast

from megatron.core.dist_checkpointing.ranged_file import Range, RangedFile, SeekableFile
from megatron.core.fsync import sync_folder
from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 20
UNFINISHED = ".unfinished"
"""Name of a marker file. In storages that cannot rename folders, the file marks a folder that is being written or
removed."""


class UrlPath(PurePosixPath):
    """A path in the storage that is registered for a URL scheme. Example: `UrlPath("s3://bucket/run") /
    "iter_0000100"`."""

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on the local disk; open it with storage_of(path)")


class Storage(Protocol):
    """Base class of storages: the files of one URL scheme. Subclasses implement the methods `names`, `size`, `read`,
    `write` and `remove`. All other methods have default implementations, which call these five methods. A subclass may
    override a default implementation, for example if the storage has a faster operation. All methods raise OSError if
    they fail, and may be called from several threads and processes. A folder exists if and only if it contains a file.
    """

    scheme: str

    read_ahead: int = CHUNK
    """Minimum number of bytes that `open` reads at a time."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    @abstractmethod
    def names(self, folder: PurePath) -> list[str]:
        """Return the sorted names of files and folders directly in a folder; [] if there is no such folder."""
        ...

    @abstractmethod
    def size(self, path: PurePath) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        ...

    @abstractmethod
    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of a file, starting at byte `start`; by default, read to the end of the file. If the
        file ends earlier, return fewer bytes. The method raises FileNotFoundError if there is no such file.
        """
        ...

    @abstractmethod
    def write(self, path: PurePath, data: bytes) -> None:
        """Write a whole file. Other processes that read the file see either the old or the new content, even after a
        power failure."""
        ...

    @abstractmethod
    def remove(self, path: PurePath) -> None:
        """Delete a file, or a folder with its contents. The method raises FileNotFoundError if `path` does not
        exist."""
        ...

    def content(self, path: PurePath) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def replace(self, path: PurePath, data: bytes, expected: bytes | None) -> None:
        """Write a whole file if its current content is `expected`. If `expected` is None, the file must not exist.

        The method raises FileExistsError if the current content is not `expected`. The default implementation is not
        atomic: if two processes call `replace` simultaneously, both may succeed.
        """
        if self.content(path) != expected:
            raise FileExistsError(f"{path} was changed by another writer")
        self.write(path, data)

    def read_shared(self, path: PurePath, start: int, length: int) -> bytes:
        """Read part of a file that never changes. All processes of a host may call this method for the same file.

        The default implementation calls `read`, and caches no data.
        """
        return self.read(path, start, length)

    def local_file(self, path: PurePath) -> Path:
        """Return a local copy of a file that never changes. The default implementation makes a new copy at every
        call."""
        copy = Path(tempfile.mkdtemp(dir=_copies().name), path.name)
        copy.write_bytes(self.read(path))
        return copy

    def cache_folder(self, path: PurePath) -> Path:
        """Return the local folder that caches files computed from the stored file `path`."""
        return Path(tempfile.gettempdir()) / f"megatron-{self.scheme}-{os.getuid()}"

    def exists(self, path: PurePath) -> bool:
        """Return whether a file or folder exists."""
        return self.size(path) is not None or bool(self.names(path))

    def open(self, path: PurePath) -> IO[bytes]:
        """Open a file for reading at any position. The method raises FileNotFoundError if there is no such file."""
        return io.BufferedReader(_Ranges(self, path), self.read_ahead)

    def open_ranges(self, path: PurePath, ranges: Iterable[Range]) -> IO[bytes]:
        """Open a file for reading `ranges` from front to back. Hardly any bytes outside of `ranges` are requested from
        the storage. The method raises FileNotFoundError if there is no such file."""
        size = self._known_size(path)
        return cast("IO[bytes]", RangedFile(partial(self.read, path), size, ranges, self.read_ahead))

    def _known_size(self, path: PurePath) -> int:
        if (size := self.size(path)) is None:
            raise FileNotFoundError(f"there is no {path}")
        return size

    def create(self, path: PurePath) -> IO[bytes]:
        """Open a new file for sequential writing. The file is complete and durable once it is closed. The default
        implementation keeps the content in memory until the file is closed.
        """
        return _Upload(self, path)

    def append(self, path: PurePath, data: bytes) -> None:
        """Append to a file. If the file does not exist, create it. The default implementation reads the file and writes
        it again as a whole."""
        self.write(path, (self.read(path) if self.size(path) is not None else b"") + data)

    def scratch(self, final: PurePath) -> PurePath:
        """Return the folder in which the files of `final` are written until `final` is published.

        Only the process that called `begin` may call this method.
        """
        return final

    def begin(self, final: PurePath, keeps_names: bool = False) -> None:
        """Prepare a folder for writing.

        `begin` also deletes other unfinished folders next to `final`, which remain if a process is killed while it
        writes. Only folders whose names have the same prefix as `final`, up to the first underscore, are deleted. The
        default implementation first deletes the folder `final` if it was published before.

        Args:
            final: The folder to be published.
            keeps_names: Whether files must be stored under their original names, so that other programs can read the
                folder.
        """
        for name in self.names(final.parent):
            beside = final.parent / name
            if name == final.name or (_kind(beside) == _kind(final) and not self.finished(beside)):
                self.withdraw(beside)
        self.write(final / UNFINISHED, b"")

    def publish(self, final: PurePath) -> None:
        """Make the complete folder visible under its final name, in one atomic and durable step."""
        self.remove(final / UNFINISHED)

    def finished(self, final: PurePath) -> bool:
        """Return whether the folder `final`, which must exist, was published."""
        return self.size(final / UNFINISHED) is None

    def discard(self, final: PurePath) -> None:
        """Discard everything written since `begin`. A published folder is never discarded."""
        if not self.finished(final):
            self.withdraw(final)

    def withdraw(self, final: PurePath) -> None:
        """Hide a folder atomically, then delete it."""
        self.write(final / UNFINISHED, b"")
        for name in self.names(final):
            if name != UNFINISHED:
                self.remove(final / name)
        self.remove(final / UNFINISHED)


class StorageClass(Protocol):
    """Type of the classes derived from `Storage` that can be registered for a URL scheme."""

    def __call__(self, scheme: str) -> Storage:
        """Create the storage object that a process uses for all URLs with the scheme."""


STORAGES = Registry("storage", NoFacts, protocol=StorageClass, makes=Storage)
"""Registry that maps each URL scheme to a storage class (`StorageClass`)."""


class LocalStorage(Storage):
    """Storage on mounted file systems. A folder is published by renaming it. A folder may be a link to a folder on
    another disk."""

    def names(self, folder: PurePath) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # ValueError: the path is invalid
            return []

    def size(self, path: PurePath) -> int | None:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        with open(path, "rb") as file:
            if start:
                file.seek(start)
            return file.read(length)

    def write(self, path: PurePath, data: bytes) -> None:
        beside = path.with_name(f"{path.name}.tmp")
        with self.create(beside) as file:
            file.write(data)
        os.replace(beside, path)
        sync_folder(Path(path.parent))

    def remove(self, path: PurePath) -> None:
        """Delete a file or folder.

        If the path is a link to a folder, such as a checkpoint that was moved to another disk, only the link is
        deleted.
        """
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def cache_folder(self, path: PurePath) -> Path:
        return Path(path.parent) / "cache"

    def exists(self, path: PurePath) -> bool:
        return os.path.exists(path)

    def open(self, path: PurePath) -> IO[bytes]:
        return open(path, "rb")

    def open_ranges(self, path: PurePath, ranges: Iterable[Range]) -> IO[bytes]:
        return self.open(path)

    def create(self, path: PurePath) -> IO[bytes]:
        return cast("IO[bytes]", _SyncedFile(path, "w"))

    def append(self, path: PurePath, data: bytes) -> None:
        with open(path, "ab", buffering=0) as file:
            file.write(data)

    def scratch(self, final: PurePath) -> PurePath:
        return final.with_suffix(".tmp")

    def begin(self, final: PurePath, keeps_names: bool = False) -> None:
        folder = Path(final.parent)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_kind(final)}_*.tmp"):
            self.remove(left)
        for replaced in folder.glob(f"{_kind(final)}_*.old"):
            if replaced.with_suffix("").exists():
                self.remove(replaced)
            else:
                replaced.rename(replaced.with_suffix(""))
        os.mkdir(self.scratch(final))

    def publish(self, final: PurePath) -> None:
        scratch, replaced = self.scratch(final), final.with_suffix(".old")
        sync_folder(Path(scratch))
        if os.path.lexists(final):
            # A rename cannot replace a non-empty folder, so the old folder is renamed first. `saved_folders` also
            # accepts the temporary name.
            with suppress(FileNotFoundError):
                self.remove(replaced)
            os.rename(final, replaced)
        os.rename(scratch, final)
        sync_folder(Path(final.parent))
        with suppress(OSError):
            self.remove(replaced)

    def finished(self, final: PurePath) -> bool:
        return True  # A folder gets its final name only by renaming, so it is always complete.

    def discard(self, final: PurePath) -> None:
        with suppress(FileNotFoundError):
            self.remove(self.scratch(final))

    def withdraw(self, final: PurePath) -> None:
        hidden = self.scratch(final)  # if this process is killed here, the next `begin` removes this folder
        os.rename(final, hidden)
        self.remove(hidden)


LOCAL = LocalStorage("file")


def located(path: str | PurePath) -> PurePath:
    """Convert the path in a flag to a `UrlPath` if a storage is registered for the path's URL scheme, and to a `Path`
    otherwise."""
    if isinstance(path, PurePath):
        return path
    scheme, mark, _ = path.partition("://")
    return UrlPath(path) if mark and scheme in STORAGES else Path(path)


def storage_of(path: PurePath) -> Storage:
    """Return the storage that contains a path."""
    return _built(path.scheme) if isinstance(path, UrlPath) else LOCAL


def resolved(path: PurePath) -> PurePath:
    """Return the path with links resolved. All paths to the same file have the same resolved path."""
    return path.resolve() if isinstance(path, Path) else path


@cache
def local_folder(folder: PurePath, wanted: Callable[[str], bool]) -> Path:
    """Return a local folder that contains links to local copies of files in a stored folder. A file is linked if
    `wanted` returns True for its name.

    Only files directly in the folder are linked. If `folder` is on the local disk, the function returns `folder`
    itself. The function raises OSError if the stored files cannot be read.
    """
    if isinstance(folder, Path):
        return folder
    found, storage = Path(tempfile.mkdtemp(dir=_copies().name)), storage_of(folder)
    for name in filter(wanted, storage.names(folder)):
        if storage.size(folder / name) is not None:
            (found / name).symlink_to(storage.local_file(folder / name).absolute())
    return found


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="megatron-copies-")


@cache
def _built(scheme: str) -> Storage:
    return STORAGES[scheme](scheme)


def _kind(folder: PurePath) -> str:
    """Return the part of a folder's name before the first underscore: `iter` for `iter_0000100`."""
    return folder.name.partition("_")[0]


class _SyncedFile(io.FileIO):
    """A file that is synced to disk when it is closed."""

    def close(self) -> None:
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()


class _Upload(io.BytesIO):
    """A file in memory that is stored as a whole when it is closed."""

    def __init__(self, storage: Storage, path: PurePath) -> None:
        super().__init__()
        self._storage, self._path = storage, path

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._storage.write(self._path, self.getvalue())
        finally:
            super().close()


class _Ranges(SeekableFile):
    """A seekable file object that reads byte ranges of a file in a storage."""

    def __init__(self, storage: Storage, path: PurePath) -> None:
        super().__init__(storage._known_size(path))
        self._storage, self._path = storage, path

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        length = min(len(into), max(0, self._size - self._at))
        data = self._storage.read(self._path, self._at, length) if length else b""
        if len(data) != length:
            raise OSError(f"{self._path}: {length} bytes requested at offset {self._at}, but {len(data)} read")
        into[: len(data)] = data
        self._at += len(data)
        return len(data)
