"""Tests of processes that build index files at the same time, are killed while they build the files, or have no write
permission."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets import index_cache
from megatron.core.datasets.build import build_datasets
from tests.corpus import write_documents
from tests.limits import HANG, wait_for

NOBODY = 65534
FORK = mp.get_context("fork")
PROCESSES = 8


def write_data(prefix: Path) -> Path:
    """Write a data set of 300 documents."""
    random = np.random.RandomState(7)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_documents(prefix, (random.randint(0, 64, length) for length in random.randint(5, 60, 300)))
    return prefix


def digest_of(prefix: Path, cache: Path | None, seed: int) -> str:
    """Build or read the data sets of a run, and return a hash of every training sample."""
    config = DatasetConfig(
        data_path=("0.3", str(prefix), "0.7", str(prefix)),
        split="90,5,5",
        data_cache_path=str(cache) if cache else None,
    )
    train = build_datasets(config, seq_length=16, seed=seed, sizes=(500, 20, 20)).train
    assert train is not None
    digest = blake2b(digest_size=8)
    for index in range(len(train)):
        digest.update(train[index]["tokens"].tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Race:
    """Results of processes that built index files at the same time."""

    digests: dict[int, set[str]]
    """Digests of the data that the processes read, keyed by seed."""

    stores: list[str]
    """Names of the written index files, one entry per write."""

    codes: list[int]


def race(prefix: Path, cache: Path | None, seeds: list[int], user: int | None = None) -> Race:
    """Start one process per seed as user `user`, and let all processes begin to build at the same moment."""
    barrier, results, stored = FORK.Barrier(len(seeds)), FORK.Queue(), FORK.SimpleQueue()

    def run(seed: int) -> None:
        if user is not None:
            os.setgid(user)
            os.setuid(user)
        _count_stores(stored)
        barrier.wait(HANG)
        results.put((seed, digest_of(prefix, cache, seed)))

    processes: list[Any] = [FORK.Process(target=run, args=(seed,)) for seed in seeds]
    for process in processes:
        process.start()
    found = [results.get(timeout=HANG) for _ in processes]
    for process in processes:
        process.join(HANG)
    digests = {seed: {digest for other, digest in found if other == seed} for seed in set(seeds)}
    return Race(digests, _names(stored), [process.exitcode for process in processes])


def _names(stored: Any) -> list[str]:
    names = []
    while not stored.empty():
        names.append(stored.get())
    return names


def _count_stores(stored: Any) -> None:
    store = index_cache.IndexCache._store

    def counted(self: index_cache.IndexCache, stem: str, *rest: Any) -> None:
        store(self, stem, *rest)
        stored.put(stem)

    index_cache.IndexCache._store = counted  # type: ignore[method-assign]


def whole(cache: Path) -> bool:
    """Return True if a folder contains complete index files and nothing else."""
    kinds = {path.suffix for path in cache.iterdir()}
    for path in cache.glob("*.npy"):
        np.load(path)
    return kinds == {".npy", ".txt"}


def two_jobs(folder: Path, rounds: int) -> None:
    """Two jobs with different seeds run at the same time, and all their processes build index files in the same
    folder."""
    seeds = [1, 2] * (PROCESSES // 2)
    prefix = write_data(folder / "data" / "x")
    expected = {seed: {digest_of(prefix, folder / "alone", seed)} for seed in set(seeds)}
    for number in range(rounds):
        cache = folder / f"cache{number}"
        result = race(prefix, cache, seeds)
        assert result.digests == expected and set(result.codes) == {0}, result
        assert len(result.stores) == len(set(result.stores)), "an index was built twice"
        assert whole(cache)


def read_only(folder: Path, rounds: int) -> None:
    """If the data folder is read-only, indices are kept in memory or written to --data-cache-path."""
    prefix = write_data(folder / "data" / "x")
    expected = digest_of(prefix, folder / "alone", 1)
    writable = folder / "elsewhere"
    writable.mkdir()
    writable.chmod(0o777)
    folder.chmod(0o755)
    (folder / "data").chmod(0o555)
    user = NOBODY if os.getuid() == 0 else None  # every folder is writable for the superuser
    in_memory = race(prefix, None, [1] * PROCESSES, user)
    assert in_memory.digests == {1: {expected}} and not in_memory.stores and set(in_memory.codes) == {0}, in_memory
    cached = race(prefix, writable / "cache", [1] * PROCESSES, user)
    assert cached.digests == {1: {expected}} and len(cached.stores) == len(set(cached.stores)), cached
    (folder / "data").chmod(0o755)
    digest_of(prefix, None, 1)  # let a user with write permission write the index files next to the data
    (folder / "data").chmod(0o555)
    found = race(prefix, None, [1] * PROCESSES, user)
    assert found.digests == {1: {expected}} and not found.stores, found
    (folder / "data").chmod(0o755)


def killed_builder(folder: Path, rounds: int) -> None:
    """The process that builds an index file is killed while it writes the file and while other processes wait for the
    file."""
    prefix = write_data(folder / "data" / "x")
    expected = digest_of(prefix, folder / "alone", 1)
    for number in range(rounds):
        cache = folder / f"cache{number}"
        victim: Any = FORK.Process(target=_build_slowly, args=(prefix, cache))
        victim.start()
        wait_for(lambda cache=cache: any(cache.glob(".*.tmp")))
        waiting: Any = FORK.Process(target=digest_of, args=(prefix, cache, 1))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive(), "the others wait for the builder"
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(HANG)
        waiting.join(HANG)
        assert waiting.exitcode == 0 and digest_of(prefix, cache, 1) == expected
        half = list(cache.glob(".*.tmp"))
        assert len(half) == 1
        os.utime(half[0], (0, 0))  # make the temporary file old, so that the next builder removes it
        assert race(prefix, cache, [3]).codes == [0] and whole(cache)


def _build_slowly(prefix: Path, cache: Path) -> None:
    def half(array: Any, path: Path) -> None:
        path.write_bytes(array.tobytes()[: array.nbytes // 2])
        time.sleep(HANG)

    index_cache._save = half
    digest_of(prefix, cache, 1)


@pytest.mark.grid("rounds", [2], [20])
@pytest.mark.parametrize("part", [two_jobs, read_only, killed_builder])
def test_processes_race_for_index_files(part: Callable[[Path, int], None], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is not accessible to other users
        part(Path(folder), rounds)
