"""Samples of indexed datasets on an S3 server equal those of the same datasets on the local disk. Each host fetches
each byte only once."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.dataset import Datasets
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.extensions import load
from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder
from megatron.extensions.data.text_data.inputs import TextFile
from megatron.extensions.operate.object_storage.block_cache import CACHE, BlockCache, Stored
from megatron.extensions.operate.object_storage.limits import LIMITS, Traffic
from tests.apart import losses_in
from tests.corpus import write_documents
from tests.extensions.object_storage.server import (
    BUCKET,
    Faults,
    credentials,
    environment,
    faulty_proxy,
    file_system,
    s3_server,
)
from tests.forked import run_forked, run_program
from tests.tiny import TINY
from tools.common.shards import Shard, of_shard

pytest.importorskip("s3fs")
URL = f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    load()
    with s3_server() as port, environment(credentials(port)):
        yield port


@pytest.fixture
def corpora(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Create two corpora on the local disk, and upload copies to `URL`. Give the test a separate, empty cache."""
    monkeypatch.setattr(CACHE, "folder", tmp_path / "blocks")
    monkeypatch.setattr(LIMITS, "traffic", Traffic())
    random, found = np.random.default_rng(1), []
    for name, documents in (("a", 3000), ("b", 500)):
        texts = (random.integers(0, 49, length) for length in random.integers(1, 400, documents))
        found.append(Path(write_documents(tmp_path / name, texts)))
        for kind in (".bin", ".idx"):
            file_system().put_file(str(tmp_path / name) + kind, f"{BUCKET}/data/{tmp_path.name}/{name}{kind}")
    return found


def under_url(path: Path) -> str:
    return f"{URL}/{path.parent.name}/{path.name}"


def built(paths: list[str], cache: Path) -> Datasets:
    values = ("0.7", paths[0], "0.3", paths[1])
    config = DatasetConfig(data_path=values, split="90,10,0", data_cache_path=str(cache))
    return build_datasets(config, seq_length=64, seed=3, sizes=(900, 50, 0), vocab_size=50)


def test_samples_match_the_local_disk(corpora: list[Path], tmp_path: Path) -> None:
    local = built([str(path) for path in corpora], tmp_path / "local")
    urls = [under_url(path) for path in corpora]
    assert data_kind_of(urls[0]) is None
    stored = built(urls, tmp_path / "stored")
    for here, there in zip(local, stored, strict=True):
        if here is None or there is None:
            assert here is there
            continue
        assert here.fingerprint == there.fingerprint and len(here) == len(there)
        for index in range(len(here)):
            assert (here.text(index) == there.text(index)).all()
            assert here.origin(index) == there.origin(index)
    sizes = sum(path.with_suffix(kind).stat().st_size for path in corpora for kind in (".bin", ".idx"))
    assert LIMITS.traffic.read <= sizes, "each byte is fetched once"
    again = LIMITS.traffic.read
    built(urls, tmp_path / "stored")
    assert LIMITS.traffic.read == again


def test_errors_name_the_data_set(corpora: list[Path], port: int) -> None:
    url = under_url(corpora[0])
    file_system().rm(f"{url}.bin")
    with pytest.raises(ValueError, match=f"dataset {url}: there is no {url}.bin"):
        IndexedDataset(url)
    with pytest.raises(ValueError, match=r"there is no s3://bucket/data/none\.idx"):
        IndexedDataset(f"{URL}/none")


def test_cut_connections_change_no_token(corpora: list[Path], port: int) -> None:
    faults = Faults(seed=5, cut=0.3)
    here = IndexedDataset(str(corpora[0]))
    with faulty_proxy(port, faults) as proxy, environment(credentials(proxy)):
        from megatron.core.dist_checkpointing.file_storage import _built

        _built.cache_clear()
        try:
            there = IndexedDataset(under_url(corpora[0]))
            for number in np.random.default_rng(2).integers(0, len(here), 200):
                assert (here[number] == there[number]).all()
        finally:
            _built.cache_clear()
    assert faults.cuts


def test_a_run_has_the_same_losses_as_with_local_data(corpora: list[Path], tmp_path: Path) -> None:
    """Two ranks share the cache, and a resumed run reuses the cache."""
    flags = [*TINY.replace("--mock-data ", "").split(), "--train-iters", "6", "--log-interval", "1"]
    flags += ["--split", "90,10,0", "--num-workers", "2", "--storage-cache", str(tmp_path / "shared")]
    losses, screens = [], []
    for name, paths in (("local", [str(path) for path in corpora]), ("stored", [under_url(path) for path in corpora])):
        save = ["--data-path", "0.7", paths[0], "0.3", paths[1], "--save", str(tmp_path / name)]
        first = run_forked(2, [*flags, *save, "--exit-interval", "3"], tmp_path / "screen")
        second = run_forked(1, [*flags, *save, "--load", str(tmp_path / name)], tmp_path / "screen")
        losses.append(losses_in(tmp_path / name / "metrics.jsonl"))
        screens.append(first + second)
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert "MB read for step 1, all from the cache" in screens[1], "opening has read samples everywhere"
    assert "data wait" in screens[1] and "data wait" not in screens[0]
    inspected = run_program("tools/inspect_dataset.py", under_url(corpora[0]), "--show", "1", code=0).stdout
    same = run_program("tools/inspect_dataset.py", corpora[0], "--show", "1", code=0).stdout
    assert inspected.splitlines()[1:] == same.splitlines()[1:]


def source(data: bytes, fetched: list[int]) -> Stored:
    def fetch(start: int, length: int) -> bytes:
        fetched.append(length)
        return data[start : start + length]

    return Stored("file", "1", len(data), fetch)


def test_the_cache_respects_its_limit_and_repairs_damage(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(5 << 20)
    fetched = list[int]()
    stored = source(data, fetched)
    cache = BlockCache(tmp_path, limit=2 << 20)
    assert cache.block_bytes(stored) == 64 << 10
    for start in np.random.default_rng(1).integers(0, len(data), 300).tolist():
        assert cache.read(stored, start, 5000) == data[start : start + 5000]
        assert cache.bytes_kept() <= cache.limit
    cache.limit, fetched[:] = 32 << 20, []
    assert cache.read(stored, 10, 100) == data[10:110] and cache.read(stored, 200, 100) == data[200:300]
    assert len(fetched) == 1
    (path,) = tmp_path.glob("*-256/00/0")
    path.write_bytes(path.read_bytes()[:-100])
    assert cache.read(stored, 10, 100) == data[10:110] and len(fetched) == 2
    assert cache.whole(stored).read_bytes() == data == cache.whole(stored).read_bytes() and fetched[2:] == [len(data)]


def test_concurrent_readers_fetch_a_block_once(tmp_path: Path) -> None:
    fetched = list[int]()
    stored, cache = source(bytes(1 << 20), fetched), BlockCache(tmp_path)
    threads = [threading.Thread(target=cache.read, args=(stored, 0, 600_000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == 3 * [256 << 10]


def test_a_full_disk_only_costs_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    fetched = list[int]()
    stored, cache = source(bytes(1 << 20), fetched), BlockCache(tmp_path)
    cache._reserve(0)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert cache.read(stored, 0, 10) == cache.read(stored, 0, 10) == bytes(10) and len(fetched) == 2


def test_shards_merge_to_the_dataset_of_one_machine(port: int, tmp_path: Path) -> None:
    """Shards are made from two files: a JSON lines file, which is divided among the shards, and a compressed file,
    which cannot be divided. The shards are written to a URL and read from this URL."""
    random = np.random.default_rng(4)
    letters = np.array(list("abcdefgh "))
    lines = [json.dumps({"text": "".join(random.choice(letters, int(random.integers(1, 900))))}) for _ in range(3000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2000]))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[2000:]))
    flags = ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", "--tokenizer-type", "ByteTokenizer"]
    flags += ["--append-eod", "--log-interval", "100000"]
    tool, url = "tools/preprocess_data.py", f"s3://{BUCKET}/data/shards"
    run_program(tool, *flags, "--output-prefix", tmp_path / "one", code=0)
    for shard in ("2/3", "1/3", "3/3"):
        said = run_program(tool, *flags, "--output-prefix", url, "--shard", shard, code=0).stdout
        assert ("not complete" in said) == (shard != "3/3") and ("joined of 3 shards" in said) == (shard == "3/3")
    for kind in (".bin", ".idx"):
        whole = (tmp_path / f"one_text_document{kind}").read_bytes()
        assert file_system().cat_file(f"{url}_text_document{kind}") == whole
    names = [name.rpartition("/")[2] for name in file_system().ls(f"{BUCKET}/data", detail=False)]
    assert [name for name in names if name.startswith("shards")] == [
        f"shards_text_document{kind}" for kind in (".bin", ".idx", ".sums.json")
    ]
    inspect = ("tools/inspect_dataset.py", f"{url}_text_document")
    assert "checksums: those of s3://bucket" in run_program(*inspect, code=0).stdout
    data = bytearray(file_system().cat_file(f"{url}_text_document.bin"))
    data[1000] ^= 1
    file_system().pipe_file(f"{url}_text_document.bin", bytes(data))
    assert "shards_text_document.bin has checksum" in run_program(*inspect, code=1).stderr
    run_program("tools/merge_datasets.py", "--input", f"{tmp_path}/one_text_document", inspect[1],
                "--output-prefix", f"{url}_merged", code=0)  # fmt: skip
    merged = IndexedDataset(f"{url}_merged")
    assert len(merged) == 6000 and (merged[5999] == merged[2999]).all()


def test_each_byte_belongs_to_one_shard() -> None:
    files = [TextFile(str(n), form, kind, size, "") for n, (form, kind, size) in enumerate(
        [("jsonl", "", 1000), ("jsonl", ".gz", 700), ("parquet", "", 1), (None, "", 0), ("jsonl", "", 5000)]
    )]  # fmt: skip
    total = sum(file.size for file in files)
    for count in (1, 2, 3, 7, 50):
        shards = Shard(0, count).all
        assert {file.path for shard in shards for file, _ in of_shard(files, shard)} == set("01234")
        for position in range(0, total, 50):
            assert sum(shard.holds(position, total) for shard in shards) == 1
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(ValueError, match=f"--shard {wrong}: must be NUMBER/COUNT"):
            Shard.of_text(wrong)


def test_a_failed_upload_leaves_nothing_behind(port: int) -> None:
    prefix = f"s3://{BUCKET}/data/failed"

    def fail() -> None:
        with IndexedDatasetBuilder(prefix, np.dtype("<u2")) as builder:
            builder.add_document(np.zeros(20 << 20, np.uint16))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not file_system().exists(f"{prefix}.bin") and not file_system().exists(f"{prefix}.idx")
    assert not file_system().call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")


def test_long_reads_are_fetched_together_and_shared(tmp_path: Path) -> None:
    data, fetched = np.random.default_rng(0).bytes((20 << 20) + 5), list[int]()
    stored, cache = source(data, fetched), BlockCache(tmp_path)
    assert cache.read_kept(stored, 17 << 20, 1 << 20) == data[17 << 20 : 18 << 20] and fetched == [1 << 20]
    threads = [threading.Thread(target=cache.read_kept, args=(stored, at, 30 << 20)) for at in (0, 3, 7 << 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.read_kept(stored, 5, 30 << 20) == data[5:] and sum(fetched) == len(data)
