"""The thread that hears signals and trigger files outlives what it finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.training.reliability.rank_store import Request
from megatron.training.reliability.watchdog import Watch


def test_a_trigger_file_that_cannot_be_removed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Request] = []
    watch = SimpleNamespace(
        _limits=SimpleNamespace(deadlines={}, folder=tmp_path), _stuck=set[Path](), _ask=asked.append
    )
    (tmp_path / "save").touch()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for _ in range(2):
            Watch._look_at_limits(watch)  # type: ignore[arg-type]
    assert asked == [] and capsys.readouterr().err.count("save is not heeded, as it cannot be removed") == 1
    Watch._look_at_limits(watch)  # type: ignore[arg-type]
    assert asked == [Request("save", f"{tmp_path / 'save'} was there")] and not (tmp_path / "save").exists()
