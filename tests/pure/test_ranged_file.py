"""Tests of files in object storage that are read in byte ranges, and of the number of bytes that are fetched to load a
checkpoint."""

from __future__ import annotations

import random
from functools import partial
from pathlib import PurePath

import pytest
import torch

from megatron.core.dist_checkpointing.file_storage import STORAGES, Storage, located, storage_of
from megatron.core.dist_checkpointing.ranged_file import END, GAP, HELD, Range, RangedFile, pieces
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import Checkpoint, save
from megatron.core.parallel_state import Axis


class Counted(Storage):
    """Storage that keeps files in a dictionary and records the bytes of each read request."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.files = dict[str, bytes]()
        self.reads = list[int]()

    def names(self, folder: PurePath) -> list[str]:
        start = f"{folder}/"
        return sorted({name[len(start) :].partition("/")[0] for name in self.files if name.startswith(start)})

    def size(self, path: PurePath) -> int | None:
        return len(self.files[str(path)]) if str(path) in self.files else None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        if str(path) not in self.files:
            raise FileNotFoundError(str(path))
        found = self.files[str(path)][start : None if length is None else start + length]
        self.reads.append(len(found))
        return found

    def write(self, path: PurePath, data: bytes) -> None:
        self.files[str(path)] = data

    def remove(self, path: PurePath) -> None:
        self.files = {name: data for name, data in self.files.items() if not f"{name}/".startswith(f"{path}/")}


STORAGES.register("counted", Counted)
ROOT = located("counted://bucket/run")


@pytest.fixture
def objects() -> Counted:
    """Return the storage for counted:// URLs, after deleting its files. The storage reads ahead, as storages of object
    stores do."""
    found = storage_of(ROOT)
    assert isinstance(found, Counted)
    found.files, found.reads, found.read_ahead = {}, [], 16 << 20
    return found


def boxes(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedBoxes]:
    return {key: ShardedBoxes(tuple(x.shape), [((0,) * x.dim(), x)]) for key, x in tensors.items()}


SIZES = [*[(3 << 20,)] * 2, (6 << 20,), (640, 1024), *[(1024,)] * 40, *[(300, 1024)] * 4]
"""Shapes of 32-bit tensors. Some tensors are larger than the largest piece that is read at once, some have at most the
size of one piece, and some are small."""


def test_a_load_fetches_each_byte_once(objects: Counted) -> None:
    saved = {f"t{number:03d}": torch.randn(shape) for number, shape in enumerate(SIZES)}
    folder = save(ROOT, 1, {**boxes(saved)}, {}, Axis())
    data = sum(tensor.nbytes for tensor in saved.values())
    checkpoint = Checkpoint(folder)
    objects.reads.clear()
    loaded = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    checkpoint.load({**boxes(loaded)}, Axis())
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert data <= sum(objects.reads) <= 1.02 * data, f"{sum(objects.reads)} bytes fetched for {data}"
    assert len(objects.reads) < 20 and max(objects.reads) <= 16 << 20


@pytest.mark.parametrize("wanted", ["t000", "t002", "t010"])
def test_loading_one_tensor_fetches_little_else(objects: Counted, wanted: str) -> None:
    saved = {f"t{number:03d}": torch.randn(shape) for number, shape in enumerate(SIZES)}
    checkpoint = Checkpoint(save(ROOT, 1, {**boxes(saved)}, {}, Axis()))
    objects.reads.clear()
    assert torch.equal(checkpoint.read(wanted), saved[wanted])
    assert sum(objects.reads) <= saved[wanted].nbytes + 2 * END


def test_the_index_is_read_in_one_request(objects: Counted) -> None:
    objects.write(ROOT / "index", bytes(1 << 20))
    with objects.open(ROOT / "index") as file:
        assert len(file.read()) == 1 << 20
    assert objects.reads == [1 << 20]


def test_a_ranged_file_reads_like_the_whole_file(objects: Counted) -> None:
    """Reads inside, outside and across overlapping ranges, and past the end of the file, return the same bytes as for
    the whole file."""
    generator, path = random.Random(5), PurePath("file")
    whole = generator.randbytes(1 << 20)
    objects.files[str(path)] = whole
    for _ in range(20):
        starts = [generator.randrange(-10, len(whole)) for _ in range(generator.randrange(5))]
        ranges = [Range(at, at + generator.choice([0, 1, 5000, 300_000])) for at in starts]
        file = RangedFile(partial(objects.read, path), len(whole), ranges, 100_000)
        for _ in range(50):
            at, length = generator.randrange(len(whole) + 10), generator.choice([0, 1, 4096, 250_000])
            assert file.seek(at) == at == file.tell()
            assert file.read(length) == whole[at : at + length]
            assert len(file._held) <= HELD
        file.seek(-5, 2)
        assert file.read() == whole[-5:] and file.read(1) == b""
    with pytest.raises(FileNotFoundError):
        objects.open_ranges(PurePath("none"), [])


def test_ranges_are_split_into_pieces() -> None:
    large = 16 << 20
    ranges = [Range(0, 10), Range(10 + GAP, 20 + GAP), Range(30 + 2 * GAP, 40 + 2 * GAP)]
    assert [*pieces(ranges, large)] == [Range(0, 20 + GAP), ranges[2]], "nearby ranges are fetched together"
    assert [*pieces([Range(5, 5 + large)], large)] == [Range(5, 5 + large)]
    assert [*pieces([Range(0, 2 * large)], large)] == [
        Range(0, END),
        Range(END, END + large),
        Range(END + large, 2 * large - END),
        Range(2 * large - END, 2 * large),
    ]
    assert [*pieces([Range(0, 8), Range(2, 5), Range(7, 9)], large)] == [Range(0, 9)]
    assert [*pieces([], large)] == []
