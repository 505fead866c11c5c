"""Check the storage against emulators of Azure and Google Cloud Storage. The test suite does not install the emulators.

    npm install azurite && pip install adlfs gcsfs gcp-storage-emulator
    python -m tests.extensions.object_storage.emulators az node_modules/.bin/azurite-blob
    python -m tests.extensions.object_storage.emulators gs gcp-storage-emulator

The program prints a line for each property that is satisfied. gcp-storage-emulator ignores the conditions of writes, so
it does not satisfy the last three properties.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import PurePath

from megatron.core.dist_checkpointing.file_storage import located
from megatron.extensions import load
from megatron.extensions.operate.object_storage.attempts import AttemptStorage
from megatron.extensions.operate.object_storage.limits import LIMITS

PORT = 10017
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Well-known account key of the Azure emulators. The key is public and the same in every installation."""

AZURITE = {
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
    f"AccountKey={AZURITE_KEY};BlobEndpoint=http://127.0.0.1:{PORT}/devstoreaccount1;"
}
GOOGLE = {
    "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{PORT}",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # otherwise, gcsfs asks a real server for the type of the bucket
    "FSSPEC_GS_TOKEN": "anon",
}
EMULATORS: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "az": (["--blobPort", str(PORT), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"], AZURITE),
    "gs": (["start", f"--port={PORT}", "--in-memory"], GOOGLE),
}
"""Command-line arguments of each emulator and environment variables of its clients, keyed by URL scheme."""


def write_folder(storage: AttemptStorage, final: PurePath, content: bytes) -> None:
    storage.begin(final)
    for name in ("a", "b"):
        with storage.create(storage.scratch(final) / name) as file:
            file.write(content)
    storage.publish(final)


def refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except FileExistsError:
        return True
    return False


def files(storage: AttemptStorage, root: PurePath) -> bool:
    file = root / "file"
    assert storage.names(root) == [] and storage.content(file) is None
    storage.write(file, b"0123456789")
    storage.append(file, b"ab")
    storage.write(root / "folder" / "inner", b"x")
    assert storage.names(root) == ["file", "folder"] and storage.size(root) is None
    assert storage.read(file, 3, 4) == b"3456" and storage.read(file, 12, 4) == b""
    return storage.size(file) == 12


def large_files(storage: AttemptStorage, root: PurePath) -> bool:
    data = os.urandom(23 << 20)
    with storage.create(root / "large") as file:
        file.write(data)
    return storage.read(root / "large", 5 << 20) == data[5 << 20 :]


def whole_checkpoints(storage: AttemptStorage, root: PurePath) -> bool:
    final, reader = root / "iter_1", AttemptStorage(storage.scheme)
    write_folder(storage, final, b"old")
    storage.begin(final)
    assert reader.read(final / "a") == b"old"
    storage.discard(final)
    write_folder(storage, final, b"new")
    assert reader.read(final / "b") == b"new" and reader.names(final) == ["a", "b"]
    storage.withdraw(final)
    return not storage.exists(final)


def a_new_file_is_not_replaced(storage: AttemptStorage, root: PurePath) -> bool:
    storage.replace(root / "new", b"1", None)
    return refused(lambda: storage.replace(root / "new", b"2", None)) and storage.read(root / "new") == b"1"


def a_write_in_between_is_noticed(storage: AttemptStorage, root: PurePath) -> bool:
    file, fs = root / "seen", storage._fs
    storage.replace(file, b"1", None)
    storage.replace(file, b"2", b"1")
    read = fs.cat_file

    def read_then_write(place: str) -> bytes:
        fs.cat_file = read
        found: bytes = read(place)
        AttemptStorage(storage.scheme).write(file, b"other")
        return found

    fs.cat_file = read_then_write
    return refused(lambda: storage.replace(file, b"3", b"2")) and storage.read(file) == b"other"


def a_late_attempt_is_refused(storage: AttemptStorage, root: PurePath) -> bool:
    final, dead = root / "iter_2", AttemptStorage(storage.scheme)
    dead.begin(final)
    write_folder(storage, final, b"whole")
    return refused(lambda: dead.publish(final)) and AttemptStorage(storage.scheme).read(final / "a") == b"whole"


PROPERTIES = (
    *(files, large_files, whole_checkpoints),
    *(a_new_file_is_not_replaced, a_write_in_between_is_noticed, a_late_attempt_is_refused),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", choices=EMULATORS)
    parser.add_argument("program", help="the emulator")
    args = parser.parse_args()
    load()
    LIMITS.retry_seconds = 30
    words, environment = EMULATORS[args.scheme]
    os.environ |= environment
    with subprocess.Popen([args.program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as emulator:
        try:
            storage = AttemptStorage(args.scheme)
            create_bucket(storage)
            for holds in PROPERTIES:
                found = "yes" if holds(storage, located(f"{args.scheme}://bucket/{holds.__name__}")) else "NO"
                print(f"{holds.__name__.replace('_', ' ')}: {found}", flush=True)
        finally:
            emulator.kill()


def create_bucket(storage: AttemptStorage) -> None:
    """Create the bucket as soon as the emulator accepts connections."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", PORT)):
            break
        time.sleep(0.5)
    if storage.scheme == "gs":
        storage._fs.call("POST", "b", project="test", json={"name": "bucket"})
    else:
        storage._fs.mkdir("bucket")


if __name__ == "__main__":
    main()
