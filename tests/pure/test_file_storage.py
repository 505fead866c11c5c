"""Tests of file storage: paths that are URLs, the operations that are derived from the five methods of a storage, and
the local disk."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path, PurePath

import pytest

from megatron.core.dist_checkpointing.file_storage import (
    STORAGES,
    UNFINISHED,
    LocalStorage,
    Storage,
    UrlPath,
    located,
    storage_of,
)


class Objects(Storage):
    """Storage that keeps files in a dictionary. The first `cut` writes and removals succeed, and all further writes and
    removals fail."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.content: dict[str, bytes] = {}
        self.reads: list[int] = []
        self.cut = 1 << 30

    def names(self, folder: PurePath) -> list[str]:
        start = f"{folder}/"
        return sorted({name[len(start) :].partition("/")[0] for name in self.content if name.startswith(start)})

    def size(self, path: PurePath) -> int | None:
        return len(self.content[str(path)]) if str(path) in self.content else None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        if str(path) not in self.content:
            raise FileNotFoundError(str(path))
        found = self.content[str(path)][start : None if length is None else start + length]
        self.reads.append(len(found))
        return found

    def write(self, path: PurePath, data: bytes) -> None:
        self._changed()
        self.content[str(path)] = data

    def remove(self, path: PurePath) -> None:
        for name in [name for name in self.content if name == str(path) or name.startswith(f"{path}/")]:
            self._changed()
            del self.content[name]

    def _changed(self) -> None:
        self.cut -= 1
        if self.cut < 0:
            raise OSError("the connection is lost")


STORAGES.register("tested", Objects)
ROOT_URL = located("tested://bucket/run")


@pytest.fixture
def objects() -> Objects:
    """Return the storage for tested:// URLs, after deleting its files."""
    found = storage_of(ROOT_URL)
    assert isinstance(found, Objects)
    found.content, found.reads, found.cut = {}, [], 1 << 30
    return found


@pytest.fixture(params=["disk", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path, objects: Objects) -> PurePath:
    return tmp_path / "run" if request.param == "disk" else ROOT_URL


def write_folder(final: PurePath, content: bytes) -> None:
    storage = storage_of(final)
    storage.begin(final)
    for name in ("a", "b"):
        with storage.create(storage.scratch(final) / name) as file:
            file.write(content)
    storage.publish(final)


def published(root: PurePath) -> list[str]:
    storage = storage_of(root)
    return [name for name in storage.names(root) if re.fullmatch(r"iter_\d", name) and storage.finished(root / name)]


def test_paths_made_from_a_url_keep_its_form() -> None:
    path = located("tested://bucket/run/iter_1")
    assert isinstance(path, UrlPath) and str(path) == "tested://bucket/run/iter_1"
    assert str(path / "a") == "tested://bucket/run/iter_1/a" and str(path.parent) == "tested://bucket/run"
    assert str(path.with_suffix(".tmp")) == "tested://bucket/run/iter_1.tmp" and path.name == "iter_1"
    assert pickle.loads(pickle.dumps(path)) == path and {path: 1}[path.parent / "iter_1"] == 1
    with pytest.raises(TypeError, match="is not on the local disk"):
        os.listdir(path)


def test_only_a_registered_scheme_is_a_url() -> None:
    assert located("unknown://bucket/run") == Path("unknown:/bucket/run")
    assert isinstance(storage_of(located("/runs/a")), LocalStorage)
    assert storage_of(located("tested://a/b")) is storage_of(located("tested://c"))


def test_a_storage_class_without_a_method_cannot_be_used() -> None:
    class Lacking(Storage):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Lacking("lacking")  # type: ignore[abstract]


def test_files_are_written_read_listed_and_removed(root: PurePath) -> None:
    storage, file = storage_of(root), root / "file"
    if isinstance(root, Path):
        root.mkdir()
    assert storage.names(root) == [] and storage.size(file) is None and not storage.exists(file)
    for missing in (storage.read, storage.open):
        with pytest.raises(FileNotFoundError):
            missing(file)
    storage.write(file, b"0123456789")
    storage.append(file, b"ab")
    storage.append(root / "log", b"line")
    assert storage.size(file) == 12 and storage.read(file) == b"0123456789ab" and storage.names(root) == ["file", "log"]
    assert storage.read(file, 3, 4) == b"3456" and storage.read(file, 10) == b"ab" and storage.read(file, 11, 9) == b"b"
    with storage.open(file) as stream:
        assert stream.seek(-2, 2) == 10 and stream.read() == b"ab"
        assert stream.seek(4) == 4 and stream.read(2) == b"45" and stream.tell() == 6
    storage.remove(file)
    assert not storage.exists(file) and storage.exists(root)


def test_a_large_file_is_read_by_ranges(objects: Objects) -> None:
    file = ROOT_URL / "large"
    objects.write(file, bytes(5 << 20))
    with objects.open(file) as stream:
        stream.seek(4 << 20)
        assert len(stream.read(100)) == 100
    assert objects.reads == [1 << 20]


def test_folders_are_published_atomically(root: PurePath) -> None:
    write_folder(root / "iter_1", b"old")
    storage = storage_of(root)
    storage.begin(root / "iter_2")
    with storage.create(storage.scratch(root / "iter_2") / "a") as file:
        file.write(b"half")
    assert published(root) == ["iter_1"]
    storage.discard(root / "iter_2")
    storage.discard(root / "iter_2")
    assert published(root) == ["iter_1"] == storage.names(root)
    write_folder(root / "iter_1", b"new")
    assert storage.read(root / "iter_1" / "b") == b"new" and storage.names(root / "iter_1") == ["a", "b"]


def test_the_next_writer_cleans_up_after_a_killed_one(root: PurePath) -> None:
    write_folder(root / "iter_1", b"old")
    storage = storage_of(root)
    storage.begin(root / "iter_2")
    storage.write(root / "best.tmp", b"of something else")
    write_folder(root / "iter_3", b"new")
    assert storage.names(root) == ["best.tmp", "iter_1", "iter_3"] and published(root) == ["iter_1", "iter_3"]


def test_a_folder_whose_removal_is_cut_off_is_gone(objects: Objects) -> None:
    for left in range(4):
        objects.cut = 1 << 30
        write_folder(ROOT_URL / "iter_1", b"old")
        objects.cut = left
        with pytest.raises(OSError, match="connection"):
            objects.withdraw(ROOT_URL / "iter_1")
        assert published(ROOT_URL) == (["iter_1"] if left == 0 else [])
    objects.cut = 1 << 30
    write_folder(ROOT_URL / "iter_2", b"new")
    assert objects.names(ROOT_URL) == ["iter_2"] and UNFINISHED not in objects.names(ROOT_URL / "iter_2")
