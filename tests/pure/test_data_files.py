"""Test that checkpoint data files are byte-identical to files that torch.save writes. If a file contains many similar
tensors, torch pickles and unpickles only a few of them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import data_files, dcp_index
from megatron.core.dist_checkpointing.data_files import TensorFormat
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError, save
from megatron.core.parallel_state import Axis


@pytest.fixture(autouse=True, params=[False, True])
def crc32(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test once with and once without torch's CRC32 checksums in archives. Checkpoint files never contain
    these checksums."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(request.param)
    yield
    torch.serialization.set_crc32_options(before)


def as_saved(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (700, 500)])
def test_bytes_match_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    written = TensorFormat()
    for seed in range(4):
        tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        file = io.BytesIO()
        written.write(tensor, file)
        assert file.getvalue() == as_saved(tensor)


def test_tensors_with_extra_attributes_are_left_to_torch() -> None:
    named = torch.ones(2, 3)
    named.note = "kept"  # type: ignore[attr-defined]
    others = [torch.ones(3, 2).t(), torch.ones(4, 3)[:2], torch.nn.Parameter(torch.ones(2, 3)), named]
    for tensor in others:
        written = TensorFormat()
        for _ in range(3):
            file = io.BytesIO()
            written.write(tensor, file)
            assert file.getvalue() == as_saved(tensor)


def test_many_similar_tensors_are_pickled_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [0], torch.save

    def counted(*args: object) -> None:
        calls[0] += 1
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data_files.torch, "save", counted)
    tensors = {f"model.{i}": torch.full((4, 2) if i % 2 else (3,), float(i)) for i in range(100)}
    save(tmp_path, 1, {k: ShardedBoxes(t.shape, [((0,) * t.dim(), t)]) for k, t in tensors.items()}, {}, Axis())
    # For each of two kinds of tensors, torch saves the first tensor, and two tensors that serve as a template.
    assert calls[0] == 2 * 3
    checkpoint = Checkpoint(tmp_path / "iter_0000001")
    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in tensors.items())


KINDS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.float32, (4, 2)),
    (torch.bfloat16, (3,)),
    (torch.float8_e4m3fn, (2, 1, 3)),
    (torch.int64, ()),
    (torch.float32, (4, 0)),
    (torch.float32, (1024, 257)),
]


def saved(root: Path, count: int) -> dict[str, Tensor]:
    """Save `count` random tensors of each kind to a checkpoint, and return the tensors."""
    generator, found = torch.Generator().manual_seed(1), {}
    for number in range(count):
        for place, (dtype, shape) in enumerate(KINDS):
            bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            found[f"model.{place}.{number}"] = bits.view(dtype).reshape(shape)
    save(root, 1, {key: whole(tensor) for key, tensor in found.items()}, {}, Axis())
    return found


def whole(tensor: Tensor) -> ShardedBoxes:
    return ShardedBoxes(tensor.shape, [((0,) * tensor.dim(), tensor)])


def bits_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {key: bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for key, tensor in tensors.items()}


def loaded(root: Path, like: dict[str, Tensor]) -> dict[str, bytes] | str:
    """Load tensors with a newly opened reader, and return their bytes, or the reader's error message."""
    targets = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    try:
        Checkpoint(root / "iter_0000001").load({key: whole(tensor) for key, tensor in targets.items()}, Axis())
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return bits_of(targets)


def test_many_similar_tensors_are_unpickled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, calls, original = saved(tmp_path, 5), [0], torch.load

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return original(*args, **options)

    monkeypatch.setattr(torch, "load", counted)
    assert loaded(tmp_path, tensors) == bits_of(tensors)
    # The reader calls torch.load four times for the kinds with few tensors, and five times for the kind with many
    # tensors.
    assert calls[0] == 4 + 5


def test_damaged_files_are_read_as_torch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file is truncated or a byte is changed, the reader returns the same values or raises the same error as
    torch.load."""
    tensors, chance = saved(tmp_path, 3), random.Random(1)
    (path,) = (tmp_path / "iter_0000001").glob("*.distcp")
    data = path.read_bytes()
    index = Checkpoint(tmp_path / "iter_0000001").index.storage_data
    ((start, length),) = [(each.offset, each.length) for key, each in index.items() if key.fqn == "model.0.2"]
    outcomes = set()
    for _ in range(40):
        place = chance.randrange(start, start + length)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        found = loaded(tmp_path, tensors)
        with monkeypatch.context() as patch:
            patch.setattr(dcp_index, "SMALL", 0)
            assert loaded(tmp_path, tensors) == found, place
        outcomes.add(type(found))
    assert outcomes == {str, dict}
    path.write_bytes(data[: len(data) // 2])
    assert isinstance(loaded(tmp_path, tensors), str)
