"""Test that an error with which torch refuses a pickle is reported in one line, without torch's advice."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.pickle_errors import why_refused


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("old_format", [False, True])
def test_the_code_that_a_file_requests_is_named(old_format: bool, tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"a": Attack(tmp_path / "ran")}, file, _use_new_zipfile_serialization=not old_format)
    told = reason(file.getvalue())
    assert told == "it asks for posix.system, but only tensors and plain values are read; no code was run"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"garbage", pickle.dumps(os.getcwd), b"\x80\x05K\x01."], ids=len)
def test_no_message_advises_to_disable_the_check(data: bytes) -> None:
    told = reason(data)
    assert told.count("\n") == 0
    assert not any(word in told for word in ("weights_only", "Weights only", "safe_globals", "trust", "option"))


def test_other_errors_are_unchanged() -> None:
    assert why_refused(OSError("no such file")) == "no such file"


def reason(data: bytes) -> str:
    with pytest.raises((pickle.UnpicklingError, EOFError, RuntimeError)) as raised:
        torch.load(io.BytesIO(data), weights_only=True)
    return why_refused(raised.value)
