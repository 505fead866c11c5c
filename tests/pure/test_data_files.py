"""Data files of checkpoints: the bytes are torch.save's, which is called for few of many equal tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import data_files
from megatron.core.dist_checkpointing.data_files import TensorFormat
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import Checkpoint, save
from megatron.core.parallel_state import Axis


@pytest.fixture(autouse=True, params=[False, True])
def crc32(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checksums in archives, which checkpoints are written without."""
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
def test_bytes_are_those_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    written = TensorFormat()
    for seed in range(4):
        tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        file = io.BytesIO()
        written.write(tensor, file)
        assert file.getvalue() == as_saved(tensor)


def test_tensors_with_more_than_values_are_left_to_torch() -> None:
    named = torch.ones(2, 3)
    named.note = "kept"  # type: ignore[attr-defined]
    others = [torch.ones(3, 2).t(), torch.ones(4, 3)[:2], torch.nn.Parameter(torch.ones(2, 3)), named]
    for tensor in others:
        written = TensorFormat()
        for _ in range(3):
            file = io.BytesIO()
            written.write(tensor, file)
            assert file.getvalue() == as_saved(tensor)


def test_many_equal_tensors_are_pickled_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [0], torch.save

    def counted(*args: object) -> None:
        calls[0] += 1
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data_files.torch, "save", counted)
    tensors = {f"model.{i}": torch.full((4, 2) if i % 2 else (3,), float(i)) for i in range(100)}
    save(tmp_path, 1, {k: ShardedBoxes(t.shape, [((0,) * t.dim(), t)]) for k, t in tensors.items()}, {}, Axis())
    assert calls[0] == 2 * 3  # two kinds: the first tensor, and two for the template
    checkpoint = Checkpoint(tmp_path / "iter_0000001")
    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in tensors.items())
