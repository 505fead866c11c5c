"""Tests of the record of the code that the user's own runs have used. A later run loads code that is named in a
checkpoint file only if the record contains this code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.code_record import record_code, standing, state_folder
from megatron.training.config.flags import all_flags, named_value, values_by_section, with_named
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.saved_flags import with_saved_flags
from megatron.training.extensions import ExtensionError, load_saved_extensions


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an extension that writes a file when it is imported, and record the extension for the run in the folder
    `run`. Return the path of the extension."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "own.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    record_code(tmp_path / "run", [str(path)])
    return path


def test_files_in_a_run_folder_may_name_recorded_code(code: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for source in (run, run / "run_config.yaml", run / "iter_0000002"):
        assert standing(source, str(code)) == "recorded"
    (tmp_path / "link").symlink_to(run)
    assert standing(tmp_path / "link" / "iter_0000002", str(code)) == "recorded"
    assert standing(tmp_path / "copy" / "run_config.yaml", str(code)) == "unknown"
    assert standing(run, str(tmp_path / "other.py")) == "unknown"


def test_code_that_has_changed_since_is_not_recorded_until_the_next_start(code: Path, tmp_path: Path) -> None:
    code.write_text("print('another')\n")
    assert standing(tmp_path / "run", str(code)) == "changed"
    record_code(tmp_path / "run", [str(code)])
    assert standing(tmp_path / "run", str(code)) == "recorded"


def test_new_code_is_added_to_the_record(code: Path, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text("")
    record_code(tmp_path / "run", [str(tmp_path / "second.py")])
    assert [standing(tmp_path / "run", str(tmp_path / name)) for name in ("own.py", "second.py")] == ["recorded"] * 2


def test_a_record_that_others_could_write_is_ignored(code: Path, tmp_path: Path) -> None:
    (record,) = state_folder().glob("*.json")
    assert record.stat().st_mode & 0o777 == 0o600 and state_folder().stat().st_mode & 0o777 == 0o700
    record.chmod(0o666)
    assert standing(tmp_path / "run", str(code)) == "unknown"


@pytest.mark.parametrize("text", ["", "[1]", '{"run": "/", "code": 3}', '{"run": "RUN", "code": [["a"]]}'])
def test_a_damaged_record_is_ignored(text: str, code: Path, tmp_path: Path) -> None:
    (record,) = state_folder().glob("*.json")
    record.write_text(text.replace("RUN", str(tmp_path / "run")))
    assert standing(tmp_path / "run", str(code)) == "unknown"


def test_a_folder_cannot_bring_the_record_that_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "downloaded" / "state"))
    (tmp_path / "downloaded").mkdir()
    (tmp_path / "downloaded" / "own.py").write_text("")
    record_code(tmp_path / "downloaded", [str(tmp_path / "downloaded" / "own.py")])
    assert standing(tmp_path / "downloaded", str(tmp_path / "downloaded" / "own.py")) == "unknown"


def test_a_module_is_recorded_with_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / "package" / f"{name}.py").write_text("")
    record_code("run", ["package.part", "package.absent"])
    assert standing("run", "package.part") == "recorded" and standing("run", "package.absent") == "unknown"
    (tmp_path / "package" / "__init__.py").write_text("print('changed')")
    assert standing("run", "package.part") == "changed"


def test_a_module_is_recorded_with_its_sibling_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    for path in (inner.parent / "__init__.py", inner.parent / "loss.py", inner / "__init__.py", inner / "part.py"):
        path.write_text("")
    names = ("package", "package.loss", "package.inner.part")
    record_code("run", names)
    assert [standing("run", name) for name in names] == ["recorded"] * 3
    (inner / "more.py").write_text("print('new')")
    assert [standing("run", name) for name in names] == ["changed"] * 3
    (inner / "more.py").unlink()
    (inner.parent / "loss.py").write_text("print('changed')")
    assert [standing("run", name) for name in names] == ["changed", "changed", "recorded"]


def test_a_checkpoint_runs_only_recorded_code(code: Path, tmp_path: Path, forget_extensions_at_once: None) -> None:
    payload = {"config": {"extensions": {"extension": [str(code)]}}}
    with pytest.raises(
        ExtensionError, match=f"runs only if the command line names the extension.* --extension {code}$"
    ):
        load_saved_extensions(payload, tmp_path / "downloaded" / "iter_0000001")
    assert not (tmp_path / "ran").exists()
    load_saved_extensions(payload, tmp_path / "run" / "iter_0000001")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("names", ["own.py", 3, [1], {"a": 1}])
def test_a_malformed_list_of_extensions_is_refused(names: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is damaged: its list of extensions"):
        load_saved_extensions({"config": {"extensions": {"extension": names}}}, tmp_path)


def test_a_configuration_runs_only_recorded_code(code: Path, tmp_path: Path, forget_extensions_at_once: None) -> None:
    for folder in ("run", "downloaded"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run_config.yaml").write_text(f"extension: [{code}]\nseed: 3\n")
    with pytest.raises(ExtensionError, match="runs only if the command line names the extension"):
        parse_args(["--config", str(tmp_path / "downloaded" / "run_config.yaml")])
    assert not (tmp_path / "ran").exists()
    config = parse_args(["--config", str(tmp_path / "run" / "run_config.yaml")])
    assert (tmp_path / "ran").exists() and config.extensions.extension == (str(code),)


def test_task_files_of_a_configuration_must_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.extensions.observe.evaluation")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text("task: mine\nprocess_docs: !function utils.run\n")
    (tmp_path / "tasks" / "utils.py").write_text("")
    (tmp_path / "x.yaml").write_text(f"eval-tasks: [{tmp_path}/tasks, lambada]\n")
    argv = ["--config", str(tmp_path / "x.yaml")]
    with pytest.raises(ValueError, match=f"eval-tasks {tmp_path}/tasks: may run code.* add --eval-tasks"):
        parse_args(argv)
    assert parse_args([*argv, "--eval-tasks", "lambada"])
    record_code(tmp_path, [f"{tmp_path}/tasks"])
    with pytest.raises(ValueError, match="may run code"):  # refused, because the record is inside the recorded folder
        parse_args(argv)
    (tmp_path / "run").mkdir()
    (tmp_path / "x.yaml").rename(tmp_path / "run" / "x.yaml")
    record_code(tmp_path / "run", [f"{tmp_path}/tasks"])
    argv = ["--config", str(tmp_path / "run" / "x.yaml")]
    assert parse_args(argv)
    (tmp_path / "tasks" / "utils.py").write_text("print('changed')")
    with pytest.raises(ValueError, match="may run code"):
        parse_args(argv)


def test_checkpoints_never_name_code_for_a_run(tmp_path: Path) -> None:
    """--use-checkpoint-args and --use-checkpoint-opt_param-scheduler restore the model, the schedule and the tokenizer.
    These flags do not restore the names of task files, which may run code."""
    fields = [flag.field for flag in all_flags() if flag.spec.names_code is not None]
    saved = with_named(RunConfig(), {field: (str(tmp_path / "tasks"),) for field in fields})
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    payload = {"config": values_by_section(with_named(saved, {"num_layers": 3}))}
    (tmp_path / "iter_0000001" / "metadata.json").write_text(json.dumps(payload))
    options = CheckpointConfig(load=str(tmp_path), use_checkpoint_args=True, use_checkpoint_opt_param_scheduler=True)
    config, _ = with_saved_flags(RunConfig(checkpoint=options))
    assert config.model.num_layers == 3
    assert [named_value(config, field) for field in fields] == [None] * len(fields)
