"""Storage of a run's files: the local disk, and for URLs what extensions register by scheme. This module does not
import torch.

A path only names a file. `storage_of(path)` does everything with it: lists, reads, writes, publishes, removes. A `Path`
is on the local disk; `located("s3://bucket/run")` is a path in the storage registered for s3.

A folder is published whole. `begin` prepares it, its files are written below `scratch`, and `publish` makes it visible
under its final name. On the local disk that is a rename. A store of objects has no rename: the folder holds the object
`.unfinished` until everything else is written.
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
"""File in a folder of a store without renames that is being written or removed."""


class UrlPath(PurePosixPath):
    """A path in the storage of a URL's scheme, such as `UrlPath("s3://bucket/run") / "iter_0000100"`."""

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on the local disk: storage_of(path) opens it")


class Storage(Protocol):
    """Files under the paths of one scheme. A class derives from this one and writes `names` to `remove`.

    The other methods follow from these; a class that can do better overrides them. All methods raise OSError, and may
    be called from several threads and processes. A folder exists as long as there is a file in it.
    """

    scheme: str

    read_ahead: int = CHUNK
    """Bytes that `open` reads at a time, or more."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    @abstractmethod
    def names(self, folder: PurePath) -> list[str]:
        """Sorted names of the files and folders directly in a folder; none if there is no such folder."""
        ...

    @abstractmethod
    def size(self, path: PurePath) -> int | None:
        """Bytes of a file; None if there is no such file."""
        ...

    @abstractmethod
    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        """Bytes `start` to `start + length`, or to the end, of a file: fewer if it is shorter. Raises
        FileNotFoundError."""
        ...

    @abstractmethod
    def write(self, path: PurePath, data: bytes) -> None:
        """Writes a whole file. Readers see the old content or the new one, also after a power cut."""
        ...

    @abstractmethod
    def remove(self, path: PurePath) -> None:
        """Deletes a file, or a folder with everything in it. Raises FileNotFoundError."""
        ...

    def content(self, path: PurePath) -> bytes | None:
        """A whole file; None if there is no such file."""
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def replace(self, path: PurePath, data: bytes, expected: bytes | None) -> None:
        """Writes a whole file whose content is `expected`; None: there is no such file. Raises FileExistsError if it
        has changed. Unless overridden, of two writers at the same moment both may succeed."""
        if self.content(path) != expected:
            raise FileExistsError(f"{path} was changed by another writer")
        self.write(path, data)

    def read_shared(self, path: PurePath, start: int, length: int) -> bytes:
        """As `read`, of a file that never changes and that all processes of the host read. Unless overridden, nothing
        is kept for the next read."""
        return self.read(path, start, length)

    def local_file(self, path: PurePath) -> Path:
        """A local copy of a file that never changes. Unless overridden, each process makes one of its own."""
        copy = Path(tempfile.mkdtemp(dir=_copies().name), path.name)
        copy.write_bytes(self.read(path))
        return copy

    def cache_folder(self, path: PurePath) -> Path:
        """A local folder for files that are computed from a stored one."""
        return Path(tempfile.gettempdir()) / f"megatron-{self.scheme}-{os.getuid()}"

    def exists(self, path: PurePath) -> bool:
        """Return whether there is a file or folder."""
        return self.size(path) is not None or bool(self.names(path))

    def open(self, path: PurePath) -> IO[bytes]:
        """Opens a file for reading at any position. Raises FileNotFoundError."""
        return io.BufferedReader(_Ranges(self, path), self.read_ahead)

    def open_ranges(self, path: PurePath, ranges: Iterable[Range]) -> IO[bytes]:
        """Opens a file of which hardly anything but `ranges` is read, from front to back. Raises FileNotFoundError."""
        size = self._known_size(path)
        return cast("IO[bytes]", RangedFile(partial(self.read, path), size, ranges, self.read_ahead))

    def _known_size(self, path: PurePath) -> int:
        if (size := self.size(path)) is None:
            raise FileNotFoundError(f"there is no {path}")
        return size

    def create(self, path: PurePath) -> IO[bytes]:
        """A new file to write from front to back; it is complete and durable once closed. Unless overridden, it is kept
        in memory until then."""
        return _Upload(self, path)

    def append(self, path: PurePath, data: bytes) -> None:
        """Adds to the end of a file, which is created if there is none. Unless overridden, writes it again."""
        self.write(path, (self.read(path) if self.size(path) is not None else b"") + data)

    def scratch(self, final: PurePath) -> PurePath:
        """Folder in which the files of the folder `final` are written until it is published, in the process that called
        `begin`."""
        return final

    def begin(self, final: PurePath, keeps_names: bool = False) -> None:
        """Prepares a folder to be written. Deletes what killed writers of such folders have left: those beside it whose
        names are equal up to the first underscore. Unless overridden, a published `final` is deleted first.

        `keeps_names`: other programs read the folder, so that its files must be stored under their names."""
        for name in self.names(final.parent):
            beside = final.parent / name
            if name == final.name or (_kind(beside) == _kind(final) and not self.finished(beside)):
                self.withdraw(beside)
        self.write(final / UNFINISHED, b"")

    def publish(self, final: PurePath) -> None:
        """Makes the folder visible at one moment, complete and durable."""
        self.remove(final / UNFINISHED)

    def finished(self, final: PurePath) -> bool:
        """Return whether an existing folder is published."""
        return self.size(final / UNFINISHED) is None

    def discard(self, final: PurePath) -> None:
        """Deletes what was written since `begin`, if anything; never a published folder."""
        if not self.finished(final):
            self.withdraw(final)

    def withdraw(self, final: PurePath) -> None:
        """Hides a folder at one moment, and deletes it."""
        self.write(final / UNFINISHED, b"")
        for name in self.names(final):
            if name != UNFINISHED:
                self.remove(final / name)
        self.remove(final / UNFINISHED)


class StorageClass(Protocol):
    """A class derived from `Storage`."""

    def __call__(self, scheme: str) -> Storage:
        """Makes the object that serves all URLs of the scheme in a process."""


STORAGES = Registry("storage", NoFacts, protocol=StorageClass, makes=Storage)
"""Scheme of a URL -> `StorageClass`."""


class LocalStorage(Storage):
    """Mounted file systems. Publishes by a rename; folders may be links to other disks."""

    def names(self, folder: PurePath) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # or a path that no file has
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
        """If it is a link to a folder, such as a checkpoint moved to another disk, deletes only the link."""
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
            # A rename cannot replace a folder that is not empty. saved_folders knows the name used in between.
            with suppress(FileNotFoundError):
                self.remove(replaced)
            os.rename(final, replaced)
        os.rename(scratch, final)
        sync_folder(Path(final.parent))
        with suppress(OSError):
            self.remove(replaced)

    def finished(self, final: PurePath) -> bool:
        return True  # anything under a final name was renamed to it

    def discard(self, final: PurePath) -> None:
        with suppress(FileNotFoundError):
            self.remove(self.scratch(final))

    def withdraw(self, final: PurePath) -> None:
        hidden = self.scratch(final)  # the next `begin` removes it if this process dies half-way
        os.rename(final, hidden)
        self.remove(hidden)


LOCAL = LocalStorage("file")


def located(path: str | PurePath) -> PurePath:
    """The path that a flag gives as text: a `UrlPath` if a storage is registered for its scheme, else a `Path`."""
    if isinstance(path, PurePath):
        return path
    scheme, mark, _ = path.partition("://")
    return UrlPath(path) if mark and scheme in STORAGES else Path(path)


def storage_of(path: PurePath) -> Storage:
    """The storage that a path is in."""
    return _built(path.scheme) if isinstance(path, UrlPath) else LOCAL


def resolved(path: PurePath) -> PurePath:
    """The path with links followed, which is equal for paths of the same file."""
    return path.resolve() if isinstance(path, Path) else path


@cache
def local_folder(folder: PurePath, wanted: Callable[[str], bool]) -> Path:
    """A folder of this process with links to local copies of the files directly in a stored folder whose names are
    `wanted`; a local folder itself. Raises OSError."""
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
    """Name of a folder up to the first underscore: iter of iter_0000100."""
    return folder.name.partition("_")[0]


class _SyncedFile(io.FileIO):
    """A file that is synced to disk when closed."""

    def close(self) -> None:
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()


class _Upload(io.BytesIO):
    """A file in memory, written whole when closed."""

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
    """A file that reads ranges of a stored one."""

    def __init__(self, storage: Storage, path: PurePath) -> None:
        super().__init__(storage._known_size(path))
        self._storage, self._path = storage, path

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        length = min(len(into), max(0, self._size - self._at))
        data = self._storage.read(self._path, self._at, length) if length else b""
        if len(data) != length:
            raise OSError(f"{self._path}: {length} bytes from {self._at} on were asked for, and {len(data)} came")
        into[: len(data)] = data
        self._at += len(data)
        return len(data)
