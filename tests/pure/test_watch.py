"""The thread that hears signals and trigger files outlives what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.reliability.rank_store import Request
from megatron.training.reliability.stop_requests import StopConditions


def test_a_trigger_file_that_cannot_be_removed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = StopConditions({}, [tmp_path])
    (tmp_path / "save").touch()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert [list(conditions.due()) for _ in range(2)] == [[], []]
    assert capsys.readouterr().err.count("save is ignored, as it cannot be removed") == 1
    assert list(conditions.due()) == [Request("save", f"{tmp_path / 'save'} was there")]
    assert not (tmp_path / "save").exists()


def test_triggers_are_looked_for_in_all_folders(tmp_path: Path) -> None:
    conditions = StopConditions({}, [tmp_path / "save", tmp_path / "triggers"])
    assert list(conditions.due()) == []
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "exit").touch()
    assert [request.kind for request in conditions.due()] == ["stop"] and list(conditions.due()) == []


def test_a_kill_switch_stops_as_long_as_it_exists(tmp_path: Path) -> None:
    switch = tmp_path / "stop-here"
    conditions = StopConditions({}, [], switch)
    assert list(conditions.due()) == []
    switch.touch()
    for _ in range(2):
        (request,) = conditions.due()
        assert request.kind == "stop" and str(switch) in request.why
    assert switch.exists()
