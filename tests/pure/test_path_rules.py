"""Test that invalid file paths are refused before any code opens the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.config.arguments import command_line, read_flags
from megatron.training.config.flags import all_flags
from megatron.training.config.problem import path_rule
from megatron.training.extensions import ExtensionError

LONG = "a" * 300


def test_a_url_needs_a_name_after_its_slashes() -> None:
    (problem,) = read_flags(["--save", "s3:///run"]).problems
    assert str(problem) == "--save s3:///run: is a URL with no name after ://; write SCHEME://NAME/FOLDER"


def test_invalid_paths_are_explained() -> None:
    assert path_rule("local", "/dev/null") is None and path_rule("local", "/dev/stdout") is None
    assert path_rule("local", f"runs/{'a' * 255}/b") is None and path_rule("url", f"s3://bucket/{LONG}") is None
    for path, said in (
        (f"runs/{LONG}/b", "has a name of 300 bytes, but file systems allow only 255"),
        ("ä" * 128, "has a name of 256 bytes"),
        ("a/" * 2500, "is longer than 4,095 bytes"),
        ("a\0b", "contains a null byte"),
        ("s3://bucket/a", "is a URL"),
        ("/dev/zero", "is a device with endless content"),
        ("/dev/../dev/full", "is a device with endless content"),
    ):
        rule = path_rule("local", path)
        assert rule is not None and rule[0].startswith(said)


PATHS = [flag for flag in all_flags() if flag.spec.path is not None and flag.field != "extension"]


@pytest.mark.parametrize("flag", PATHS, ids=lambda flag: flag.name)
def test_every_path_flag_refuses_names_that_are_too_long(flag: object, tmp_path: Path) -> None:
    name = flag.name  # type: ignore[attr-defined]
    (problem,) = read_flags([name, f"{tmp_path}/{LONG}"]).problems
    assert (problem.flag, problem.rule) == (name, "has a name of 300 bytes, but file systems allow only 255")


@pytest.mark.parametrize("name", ["--hf-family", "--data-phases", "--tokenizer-model", "--load"])
def test_no_flag_reads_an_endless_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line([name, "/dev/zero"])
    assert f"{name} /dev/zero: is a device with endless content; name a file" in capsys.readouterr().err


def test_extensions_and_files_of_commands_refuse_long_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExtensionError, match="has a name of 303 bytes"):
        read_flags(["--extension", f"{LONG}.py"])
    with pytest.raises(SystemExit, match="2"):
        command_line(["--dry-run", "--json", LONG])
    assert f"--json {LONG}: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--data-args-path", "--train-weighted-split-paths-path", "--save", "--data-phases"])
def test_a_url_is_refused_where_a_file_is_read(flag: str) -> None:
    (problem,) = read_flags([flag, "other://bucket/list"]).problems
    assert problem.flag == flag and problem.rule.startswith("is a URL")
