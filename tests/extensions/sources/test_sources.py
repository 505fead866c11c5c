"""Tests of training on data sets written by other libraries: documents, errors and resumed runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.dist_checkpointing.file_storage import _built
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.extensions import load
from megatron.extensions.data.sources import documents
from megatron.extensions.data.sources.path_kinds import SourceKind
from megatron.extensions.data.sources.sample_stream import Place, SampleStream
from megatron.extensions.data.text_data.flags import TextDataConfig
from megatron.extensions.operate.object_storage.block_cache import CACHE
from tests.extensions.object_storage.server import BUCKET, credentials, environment, file_system, s3_server
from tests.faults.test_kills import check_kills
from tests.forked import run_forked
from tests.tiny import TINY

TEXTS = [f"document {number} of a corpus: {'ab ' * (number % 7)}" for number in range(40)]
IDS = [np.random.default_rng(n).integers(0, 49, n % 23 + 1) for n in range(60)]


def saved(folder: Path, column: str, values: Sequence[object]) -> str:
    """Write a data set of two files with `save_to_disk`."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"id": list(range(len(values))), column: values})
    made.save_to_disk(str(folder / "saved"), num_shards=2)
    return str(folder / "saved")


def rows(folder: Path, column: str, values: Sequence[object]) -> str:
    """Write two files in a format that the package `datasets` reads."""
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    (folder / "rows").mkdir()
    for number, part in enumerate((values[:10], values[10:])):
        table = pyarrow.table({column: part})
        parquet.write_table(table, folder / "rows" / f"{number}.parquet")
    return f"datasets:{folder / 'rows'}"


def web_shards(folder: Path, column: str, values: Sequence[object]) -> str:
    """Write two tar files. Each text is a .txt member, and token ids are stored in .json members."""
    webdataset = pytest.importorskip("webdataset")
    for number, part in enumerate((values[:10], values[10:])):
        with webdataset.TarWriter(str(folder / f"shard-{number}.tar")) as writer:
            for place, value in enumerate(part):
                key = f"{number}{place:04}"
                if isinstance(value, str):
                    writer.write({"__key__": key, "txt": value})
                else:
                    writer.write({"__key__": key, "json": {column: np.asarray(value).tolist()}})
    return str(folder / "shard-{0..1}.tar")


def mosaic(folder: Path, column: str, values: Sequence[object], compression: str | None = None) -> str:
    """Write several shards in MosaicML's format."""
    streaming = pytest.importorskip("streaming")
    encoding = "str" if isinstance(values[0], str) else "ndarray:int64"
    rules = {"columns": {"id": "int", column: encoding}, "size_limit": 1 << 11, "compression": compression}
    with streaming.MDSWriter(out=str(folder / "mds"), **rules) as writer:
        for number, value in enumerate(values):
            writer.write({"id": number, column: value})
    return str(folder / "mds")


def zipped_mosaic(folder: Path, column: str, values: Sequence[object]) -> str:
    return mosaic(folder, column, values, "zstd")


Put = Callable[[str], str]
MAKERS: list[Callable[[Path, str, Sequence[object]], str]] = [saved, rows, web_shards, mosaic, zipped_mosaic]
BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Yield a function that puts local files into object storage and returns their URL. The local cache for remote
    files is initially empty."""
    pytest.importorskip("s3fs")
    load()
    monkeypatch.setattr(CACHE, "folder", tmp_path / "copies")

    def put(path: str) -> str:
        place = Path(path.removeprefix("datasets:"))
        for file in place.rglob("*") if place.is_dir() else place.parent.glob("*.tar"):
            file_system().put_file(str(file), f"{BUCKET}/{file.relative_to(tmp_path)}")
        return f"{'datasets:' if place.is_dir() else ''}s3://{BUCKET}/{place.name}"

    with s3_server() as port, environment(credentials(port)):
        _built.cache_clear()
        yield put
    _built.cache_clear()


def made(
    path: str,
    tokenizer: TokenizerConfig = BYTES,
    vocab_size: int | None = None,
    cache: Path | None = None,
    **options: object,
) -> str:
    """Return the prefix of the indexed dataset that a run creates from the data set at `path`."""
    config = DatasetConfig(data_cache_path=cache and str(cache)).with_options(TextDataConfig(**options))  # type: ignore[arg-type]
    kind = data_kind_of(path)
    assert kind is not None and path in kind.describe("--data-path", path)
    return kind.reader(config, tokenizer, vocab_size, list).prefix("--data-path", path)


@pytest.mark.parametrize("maker", MAKERS)
def test_texts_become_the_tokens_of_text_files(tmp_path: Path, maker: Callable[..., str]) -> None:
    path = maker(tmp_path, "text", TEXTS)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found, expected = made(path), made(str(tmp_path / "a.jsonl"))
    assert found != expected and made(path) == found
    for suffix in (".bin", ".idx"):
        assert Path(found + suffix).read_bytes() == Path(expected + suffix).read_bytes()


@pytest.mark.parametrize("maker", MAKERS)
def test_token_ids_are_used_unchanged(tmp_path: Path, maker: Callable[..., str]) -> None:
    path = maker(tmp_path, "input_ids", IDS)
    indexed = IndexedDataset(made(path, TokenizerConfig(), 50))
    assert indexed.dtype == np.uint16 and len(indexed) == len(IDS) and indexed.checked
    assert all(indexed[number].tolist() == ids.tolist() for number, ids in enumerate(IDS))


@pytest.mark.parametrize("maker", [saved, rows, web_shards])
def test_files_on_urls_give_the_same_data_as_local_files(
    tmp_path: Path, maker: Callable[..., str], stored: Put
) -> None:
    """The documents of a URL can also be streamed from any position."""
    local = maker(tmp_path, "input_ids", IDS)
    url = stored(local)
    found, expected = (made(path, TokenizerConfig(), 50, cache=tmp_path / "tokens") for path in (url, local))
    assert Path(f"{found}.bin").read_bytes() == Path(f"{expected}.bin").read_bytes()
    kind = data_kind_of(url)
    assert isinstance(kind, SourceKind)
    documents = kind.opened("--data-path", url, "text")
    whole = list(documents.read_from(None))
    for number in (1, 30, len(whole) - 1):
        again = list(documents.read_from(json.loads(json.dumps(whole[number][0]))))
        assert [value.tolist() for _, value in again] == [value.tolist() for _, value in whole[number:]]
    if maker is web_shards:  # files of the other formats are copied and read as local files
        flags = f"{TINY} --data-path {url} --dataset-type stream".replace("--mock-data", "")
        run_forked(2, [*flags.split(), "--storage-cache", str(tmp_path / "copies")], tmp_path / "screen")


def test_errors_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, "body", TEXTS)
    with pytest.raises(ValueError, match=r"--data-path .*saved: no column 'text' \(--text-key\); .* 'body', 'id'"):
        made(path)
    assert len(IndexedDataset(made(path, text_key=("body",)))) == len(TEXTS)
    with pytest.raises(ValueError, match="neither text nor token ids, but int"):
        made(path, text_key=("id",))
    with pytest.raises(ValueError, match="there is no file that datasets reads"):
        made("datasets:nothing/*.parquet")
    monkeypatch.setattr(documents, "import_module", lambda name: __import__("no_such_library"))
    for maker in (path, str(tmp_path / "shard.tar")):
        (tmp_path / "shard.tar").touch()
        with pytest.raises(ValueError, match=r"needs the extra \[(datasets|webdataset)\] .* pip install"):
            made(maker)


def test_shards_without_the_text_member_are_refused(tmp_path: Path) -> None:
    path = web_shards(tmp_path, "other", IDS)
    with pytest.raises(ValueError, match=r"shard-0.tar, 00000: no member 'text' .*'json'.* json has 'other'"):
        made(path)
    assert len(IndexedDataset(made(path, text_key=("other",)))) == len(IDS)
    with pytest.raises(ValueError, match=r"there is no shard .*shard-2.tar; correct the range"):
        made(path.replace("0..1", "0..2"))
    shard = tmp_path / "shard-0.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"shard-0.tar: the tar file is truncated or damaged \("):
        made(path)


@pytest.mark.parametrize(
    ("maker", "how"), [(saved, "--split 1,0,0 --sequence-packing best-fit"), (rows, "--dataset-type stream")]
)
def test_a_killed_run_continues_under_other_layouts(tmp_path: Path, maker: Callable[..., str], how: str) -> None:
    path = maker(tmp_path, "input_ids", IDS)
    check_kills(tmp_path, (8, 4, 1), f"--data-path {path} {how} --tokenizer-type NullTokenizer".split())


@pytest.mark.parametrize("maker", MAKERS)
def test_streams_continue_from_any_position(tmp_path: Path, maker: Callable[..., str]) -> None:
    path = maker(tmp_path, "input_ids", IDS)
    kind = data_kind_of(path)
    assert isinstance(kind, SourceKind)

    def stream(window: int = 8) -> SampleStream:
        return SampleStream(kind.opened("--data-path", path, "text"), np.asarray, 16, "3", window)

    per_epoch = sum(map(len, IDS)) // 16
    begun, in_order = stream(), stream(1)
    whole = [sample.tolist() for sample in islice(begun(0), 2 * per_epoch)]
    joined = np.concatenate([*IDS, *IDS]).tolist()
    assert [sample.tolist() for sample in islice(in_order(0), 40)] == [joined[n * 16 : n * 16 + 17] for n in range(40)]
    assert whole[:40] != [joined[n * 16 : n * 16 + 17] for n in range(40)]
    epoch = np.concatenate([sample[:-1] for sample in whole[:per_epoch]])
    assert (np.bincount(joined[: len(joined) // 2], minlength=49) - np.bincount(epoch, minlength=49)).sum() < 16
    for number in (1, 7, per_epoch + 5):
        resumed = stream()
        resumed.know(number, Place(*json.loads(json.dumps(begun.place(number)))))
        assert [sample.tolist() for sample in islice(resumed(number), 9)] == whole[number : number + 9]
        assert resumed.place(number + 4) == begun.place(number + 4)
        assert [sample.tolist() for sample in islice(stream()(number), 2)] == whole[number : number + 2]


def test_a_stream_of_text_is_tokenized_while_the_run_trains(tmp_path: Path) -> None:
    path = saved(tmp_path, "text", TEXTS)
    flags = f"{TINY} --data-path {path} --dataset-type stream --tokenizer-type ByteTokenizer".replace("--mock-data", "")
    assert "iteration        4/" in run_forked(1, flags.replace("--vocab-size 50", "").split(), tmp_path / "screen")
