"""Object storage on an S3 server keeps its guarantees even if connections are cut."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.file_storage import UNFINISHED, located
from megatron.extensions.operate.object_storage.attempts import ATTEMPT, PUBLISHED, AttemptStorage
from megatron.extensions.operate.object_storage.block_cache import CACHE
from megatron.extensions.operate.object_storage.fsspec_storage import FsspecStorage
from megatron.extensions.operate.object_storage.limits import LIMITS, Limits, Traffic, is_final
from megatron.extensions.operate.object_storage.s3_requests import is_precondition
from megatron.extensions.operate.object_storage.two_tiers import local_root
from megatron.extensions.operate.object_storage.versioned_writes import replace_seen
from tests.extensions.object_storage.server import (
    BUCKET,
    Faults,
    credentials,
    environment,
    faulty_proxy,
    file_system,
    s3_server,
)

pytest.importorskip("s3fs")
ROOT = located(f"s3://{BUCKET}/run")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def storage(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptStorage]:
    """Yield an `AttemptStorage` for an empty bucket."""
    monkeypatch.setattr(LIMITS, "part_bytes", 5 << 20)
    with environment(credentials(port)):
        files = file_system()
        if files.exists(f"{BUCKET}/run"):
            files.rm(f"{BUCKET}/run", recursive=True)
        yield AttemptStorage("s3")


def write_folder(storage: FsspecStorage, final: PurePath, content: bytes) -> None:
    storage.begin(final)
    for name in ("a", "b"):
        with storage.create(storage.scratch(final) / name) as file:
            file.write(content)
    storage.publish(final)


def uploads(port: int) -> list[str]:
    found = file_system().call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
    return [each["Key"] for each in found]


def test_files_are_written_read_listed_and_removed(storage: AttemptStorage) -> None:
    file = ROOT / "file"
    assert storage.names(ROOT) == [] and storage.size(file) is None and not storage.exists(file)
    for missing in (storage.read, storage.open, storage.remove):
        with pytest.raises(FileNotFoundError):
            missing(file)
    storage.write(file, b"0123456789")
    storage.append(file, b"ab")
    storage.write(ROOT / "folder" / "inner", b"")
    assert storage.size(file) == 12 and storage.read(file) == b"0123456789ab"
    assert storage.names(ROOT) == ["file", "folder"] and storage.names(file) == [] and storage.size(ROOT) is None
    assert storage.read(file, 3, 4) == b"3456" and storage.read(file, 10) == b"ab" and storage.read(file, 11, 9) == b"b"
    assert storage.read(file, 12, 4) == b"" and storage.content(ROOT / "none") is None
    with storage.open(file) as stream:
        assert stream.seek(-2, 2) == 10 and stream.read() == b"ab"
    storage.remove(ROOT)
    assert not storage.exists(ROOT)


def test_names_are_not_treated_as_patterns(storage: AttemptStorage) -> None:
    other, own = (ROOT / name / "iter_0000001" for name in ("lr1", "lr[12]"))
    for final in (other, own):
        write_folder(storage, final, b"x")
    storage.withdraw(own)
    assert not storage.exists(own)
    with pytest.raises(FileNotFoundError):
        storage.remove(ROOT / "lr*" / "iter_0000001")
    assert AttemptStorage("s3").finished(other) and AttemptStorage("s3").read(other / "a") == b"x"


def test_a_large_object_is_uploaded_in_parts_with_bounded_memory(
    storage: AttemptStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "traffic", Traffic())
    before = LIMITS._held
    data = os.urandom(1 << 20)
    with storage.create(ROOT / "large") as file:
        for _ in range(23):
            file.write(data)
        assert storage.size(ROOT / "large") is None, "the file exists after it is closed"
    assert storage.read(ROOT / "large") == 23 * data
    part = LIMITS.part_bytes
    assert 2 * part <= LIMITS.traffic.upload_memory - before <= 5 * part and LIMITS._held == before
    storage.append(ROOT / "large", b"more")
    assert storage.size(ROOT / "large") == (23 << 20) + 4 and storage.read(ROOT / "large", 23 << 20) == b"more"


def test_an_object_is_replaced_only_if_unchanged(storage: AttemptStorage) -> None:
    file = ROOT / "latest"
    storage.replace(file, b"1", None)
    with pytest.raises(FileExistsError, match="changed by another writer"):
        storage.replace(file, b"2", None)
    storage.replace(file, b"2", b"1")
    with pytest.raises(FileExistsError):
        storage.replace(file, b"3", b"1")
    storage.replace(file, b"2", b"1")  # succeeds, because the file already contains b"2"
    with pytest.raises(FileExistsError):
        storage.replace(ROOT / "gone", b"2", b"1")
    assert storage.read(file) == b"2"


def test_an_interrupted_upload_is_invisible_and_removed(storage: AttemptStorage, port: int) -> None:
    write_folder(storage, ROOT / "iter_1", b"whole")
    storage.begin(ROOT / "iter_2")
    file = storage.create(storage.scratch(ROOT / "iter_2") / "a")
    file.write(bytes(12 << 20))  # the process is killed at this point
    time.sleep(0.5)
    assert not storage.finished(ROOT / "iter_2") and [key.split("/")[1] for key in uploads(port)] == ["iter_2"]
    write_folder(storage, ROOT / "iter_3", b"whole")
    assert storage.names(ROOT) == ["iter_1", "iter_3"] and uploads(port) == []


def test_late_requests_of_a_dead_attempt_change_no_checkpoint(storage: AttemptStorage) -> None:
    """The object store executes late requests of a dead writer after the next writer has written the same
    checkpoint."""
    final, dead, reader = ROOT / "iter_1", AttemptStorage("s3"), AttemptStorage("s3")
    dead.begin(final)
    late = dead.scratch(final) / "a"
    write_folder(storage, final, b"whole")
    for name in (late.name, UNFINISHED):
        dead.write(late.with_name(name), b"dead")
    dead.write(final / UNFINISHED, b"")
    with pytest.raises(FileExistsError, match="changed by another writer"):
        dead.publish(final)
    assert reader.finished(final) and reader.read(final / "a") == b"whole" and reader.names(final) == ["a", "b"]
    dead.discard(final)
    dead.write(late, b"dead")
    assert reader.finished(final) and reader.read(final / "b") == b"whole"
    storage.withdraw(final)
    dead.write(late, b"dead")
    assert not reader.finished(final)
    write_folder(AttemptStorage("s3"), ROOT / "iter_2", b"whole")
    assert storage.names(ROOT) == ["iter_2"]


@pytest.mark.parametrize("then", ["iter_1", "iter_2"])
def test_an_attempt_is_not_published_after_the_next_has_begun(storage: AttemptStorage, then: str) -> None:
    """The next attempt removes the files of the first attempt."""
    dead = AttemptStorage("s3")
    dead.begin(ROOT / "iter_1")
    dead.write(dead.scratch(ROOT / "iter_1") / "a", b"dead")
    storage.begin(ROOT / then)
    with pytest.raises(FileExistsError, match="changed by another writer"):
        dead.publish(ROOT / "iter_1")
    dead.discard(ROOT / "iter_1")
    storage.write(storage.scratch(ROOT / then) / "a", b"whole")
    storage.publish(ROOT / then)
    assert storage.names(ROOT) == [then] and AttemptStorage("s3").read(ROOT / then / "a") == b"whole"


def test_readers_follow_a_rewritten_checkpoint(storage: AttemptStorage) -> None:
    final, reader = ROOT / "iter_1", AttemptStorage("s3")
    FsspecStorage.begin(storage, final)
    for content in (b"as earlier versions wrote it", b"old", b"new"):
        if content.startswith(b"as"):
            storage.write(final / "a", content)
            FsspecStorage.publish(storage, final)
        else:
            write_folder(storage, final, content)
        assert reader.size(final / "a") == len(content) and reader.read(final / "a") == content
        assert reader.finished(final)
    found = sorted(path.split("/")[3] for path in file_system().find(f"{BUCKET}/run"))
    assert found == [storage.read(final / PUBLISHED).decode().strip()] * 2 + [PUBLISHED] and found[0].startswith(
        ATTEMPT
    )
    storage.begin(final, keeps_names=True)
    with storage.create(final / "config.json") as file:
        file.write(b"{}")
    assert not reader.finished(final)
    storage.publish(final)
    assert reader.finished(final) and file_system().find(f"{BUCKET}/run") == [f"{BUCKET}/run/iter_1/config.json"]


def test_replacing_a_file_during_a_read_is_an_error(
    storage: AttemptStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(CACHE, "folder", tmp_path)
    data, block = ROOT / "data.bin", 256 << 10
    storage.write(data, b"A" * (2 * block))
    assert storage.read_shared(data, 0, 4) == b"AAAA" and storage.read_shared(data, block, 2) == b"AA"
    storage.write(data, b"A" * (2 * block))  # the same content
    (tmp_path / "once").mkdir()
    monkeypatch.setattr(CACHE, "folder", tmp_path / "once")
    assert storage.read_shared(data, 0, 4) == b"AAAA"
    storage.write(data, b"B" * (2 * block))
    with pytest.raises(FileExistsError, match=f"{data}: .*the object has been replaced"):
        storage.read_shared(data, block, 2)


def test_cut_connections_change_nothing(port: int, storage: AttemptStorage) -> None:
    """Files are written and read through a proxy that cuts connections at random."""
    faults = Faults(seed=7, cut=0.3)
    data = os.urandom(11 << 20)
    with faulty_proxy(port, faults) as proxy, environment(credentials(proxy)):
        tried = AttemptStorage("s3")
        write_folder(tried, ROOT / "iter_1", data)
        tried.replace(ROOT / "latest", b"1", None)
        tried.replace(ROOT / "latest", b"2", b"1")
        for at in range(0, len(data), 3 << 20):
            assert tried.read(ROOT / "iter_1" / "b", at, 3 << 20) == data[at : at + (3 << 20)]
    assert faults.cuts > 3
    assert storage.finished(ROOT / "iter_1") and storage.read(ROOT / "iter_1" / "a") == data
    assert storage.read(ROOT / "latest") == b"2"


def test_a_store_that_stops_reading_does_not_stop_the_upload(
    port: int, storage: AttemptStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open, so that neither an error nor an answer arrives."""
    monkeypatch.setattr(LIMITS, "timeout_seconds", 4.0)
    monkeypatch.setattr(LIMITS, "slowest", 5e6)
    monkeypatch.setattr(LIMITS, "traffic", Traffic())
    data = os.urandom(11 << 20)
    with faulty_proxy(port, Faults(seed=1, stall_after=7 << 20)) as proxy, environment(credentials(proxy)):
        file = AttemptStorage("s3").create(ROOT / "stalled")
        file.write(data)
        file.close()
    assert LIMITS.traffic.repeated >= 1 and storage.read(ROOT / "stalled") == data


def test_failed_retries_end_with_a_clear_error_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "retry_seconds", 6.0)
    given = credentials(9)
    with environment(given), pytest.raises(OSError, match=r"s3://bucket/run/a: .*\(\d+ attempts in \d+ s\)") as error:
        FsspecStorage("s3").write(ROOT / "a", b"1")
    assert given["AWS_SECRET_ACCESS_KEY"] not in str(error.value)


def test_an_invalid_bucket_name_is_refused_at_once() -> None:
    error = pytest.importorskip("botocore.exceptions").ParamValidationError(report="Invalid bucket name")
    assert is_final(error) and not is_final(ConnectionError())


def test_a_trailing_slash_does_not_change_the_local_folder() -> None:
    assert local_root("/fast", "s3://bucket/run/") == local_root("/fast", "s3://bucket/run")
    assert local_root("/fast", "s3://bucket/run") != local_root("/fast", "s3://other/run")


def test_a_permanent_error_is_raised_at_once() -> None:
    limits, calls = Limits(), list[int]()

    def missing(attempt: int) -> None:
        calls.append(attempt)
        raise FileNotFoundError("no")

    with pytest.raises(FileNotFoundError):
        limits.tried("a", missing)
    assert calls == [0]


def test_time_limits_ignore_time_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process is stopped, its requests exceed their time limit. The requests fail when the process continues,
    and must then be retried."""
    now = [0.0]
    monkeypatch.setattr("megatron.extensions.operate.object_storage.limits.time.monotonic", lambda: now[0])
    limits = Limits(retry_seconds=30, timeout_seconds=10, answered=True)

    def stopped(attempt: int) -> int:
        if attempt < 2:
            now[0] += 3600
            raise OSError("timed out")
        return attempt

    assert limits.tried("a", stopped, lambda _: None) == 2
    with pytest.raises(OSError, match=r"a: .*\(3 attempts in 10800 s\)"):
        limits.tried("a", lambda attempt: stopped(0), lambda _: None)


def test_retry_pauses_grow_and_the_bandwidth_limit_is_kept() -> None:
    limits, pauses = Limits(), list[float]()

    def third(attempt: int) -> int:
        if attempt < 3:
            raise OSError("not now")
        return attempt

    assert limits.tried("a", third, pauses.append) == 3 and limits.traffic.repeated == 3
    assert 0.05 <= pauses[0] <= 0.1 and 0.2 <= pauses[2] <= 0.4
    slow, began = SimpleNamespace(limits=Limits(bytes_per_second=1e6)), time.monotonic()
    for _ in range(4):
        slow.limits.move(100_000)
    assert time.monotonic() - began >= 0.25


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_google_and_azure_replace_only_the_version_that_was_read(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, a mock replaces the file systems of gcsfs and adlfs. `emulators.py` uses the real packages."""

    class Store:
        """Mock of a file system of gcsfs or adlfs with one object. The object is written only if its version has not
        changed."""

        base = "http://store/storage/v1/"
        content, version = b"1", 7

        def info(self, place: str) -> dict[str, object]:
            return {"etag": self.version, "generation": self.version, "name": place}

        def cat_file(self, place: str) -> bytes:
            return self.content

        def pipe_file(self, place: str, data: bytes, etag: int, match_condition: str) -> None:
            assert place == "bucket/a b" and match_condition == "if not modified"
            self.put(data, etag)

        def call(self, method: str, url: str, *, data: bytes, name: str, **given: Any) -> None:
            assert (method, url, name) == ("POST", "http://store/upload/storage/v1/b/bucket/o", "a b")
            self.put(data, given["ifGenerationMatch"])

        def put(self, data: bytes, version: int) -> None:
            if version != self.version:
                raise OSError("ConditionNotMet")
            self.content, self.version = data, self.version + 1

    azure = SimpleNamespace(MatchConditions=SimpleNamespace(IfNotModified="if not modified"))
    monkeypatch.setitem(sys.modules, "azure", SimpleNamespace(core=azure))
    monkeypatch.setitem(sys.modules, "azure.core", azure)
    store = Store()
    replaced = partial(replace_seen, store, scheme, "bucket/a b")
    assert replaced(b"2", b"1") and not replaced(b"3", b"1") and store.content == b"2"
    # `info` returns a stale state, from before a write by another process.
    monkeypatch.setattr(store, "info", lambda place: {"etag": 7, "generation": 7})
    with pytest.raises(OSError, match="ConditionNotMet") as error:
        replaced(b"3", b"2")
    assert is_precondition(error.value) and store.content == b"2"


def test_any_fsspec_store_can_be_used(capfd: pytest.CaptureFixture[str]) -> None:
    """fsspec's in-memory store supports neither conditional replacement nor multipart uploads."""
    storage, root = AttemptStorage("memory"), PurePath("/run")
    write_folder(storage, root / "iter_1", b"whole")
    assert storage.names(root / "iter_1") == ["a", "b"] and storage.finished(root / "iter_1")
    storage.replace(root / "latest", b"1", None)
    storage.replace(root / "latest", b"2", b"1")
    with pytest.raises(FileExistsError):
        storage.replace(root / "latest", b"3", b"1")
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("/run/iter_1/published.txt: this store has no conditional writes")
    storage.append(root / "latest", b"3")
    assert storage.read(root / "latest") == b"23"
    storage.remove(root)
    assert not storage.exists(root)
