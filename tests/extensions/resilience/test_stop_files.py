"""A run detects and removes the files that request a stop or a save. The thread that looks for these files must not
fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.extensions.operate.resilience.flags import StopFileFlags, rules_of_stop_file
from megatron.extensions.operate.resilience.save_folder import StopFiles
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.reliability.rank_store import Request
from megatron.training.reliability.watchdog import Watchdog


def looks_in(save: Path, **flags: str) -> StopFiles:
    config = RunConfig(checkpoint=CheckpointConfig(save=str(save)), extension_options=(StopFileFlags(**flags),))
    return StopFiles(config, Watchdog())


def test_a_trigger_file_that_cannot_be_removed_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = looks_in(tmp_path)
    (tmp_path / "save").touch()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert [list(files.due()) for _ in range(2)] == [[], []]
    assert capsys.readouterr().err.count("save is ignored: it cannot be removed") == 1
    assert list(files.due()) == [Request("save", f"{tmp_path / 'save'} was there")]
    assert not (tmp_path / "save").exists()


def test_triggers_are_detected_in_all_folders(tmp_path: Path) -> None:
    files = looks_in(tmp_path / "save", trigger_path=str(tmp_path / "triggers"))
    assert list(files.due()) == []
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "exit").touch()
    assert [request.kind for request in files.due()] == ["stop"] and list(files.due()) == []


def test_a_kill_switch_stops_as_long_as_it_exists(tmp_path: Path) -> None:
    switch = tmp_path / "stop-here"
    files = looks_in(tmp_path / "save", kill_switch_path=str(switch))
    assert list(files.due()) == []
    switch.touch()
    for _ in range(2):
        (request,) = files.due()
        assert request.kind == "stop" and str(switch) in request.why
    assert switch.exists()


def test_a_kill_switch_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    flags = StopFileFlags(kill_switch_path=str(tmp_path))
    (problem,) = rules_of_stop_file(RunConfig(extension_options=(flags,)), 1)
    assert "is a folder but must be a file" in str(problem)
    assert list(looks_in(tmp_path / "save", kill_switch_path=str(tmp_path)).due()) == []
