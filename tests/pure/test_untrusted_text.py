"""Tests of untrusted YAML and JSON files. Contents that are not allowed are refused quickly, with a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.json_text import parse_json
from megatron.core.config.layers import layer_numbers
from megatron.training.config.arguments import read_flags
from megatron.training.config.flags import values_by_section
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import check_types, saved_metadata
from megatron.training.config.yaml_text import MOST_BYTES, compose_yaml, load_yaml

TENFOLD = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
"""YAML text in which each line expands to ten times as many values as the previous line."""

REFUSED = {
    "aliases that expand": (f"a0: &a0 x\n{TENFOLD}", "line 6: a value stands for more than 100,000 values"),
    "a list that contains itself": ("data-path: &a [b, *a]", "line 1: a value contains itself"),
    "a mapping that contains itself": ("&a\nlr: *a", "line 1: a value contains itself"),
    "nested beyond the limit": ("lr: " + "[" * 60 + "]" * 60, "line 1: a value nests more than 50 levels deep"),
    "nested beyond the parser": ("lr: " + "[" * 5000 + "]" * 5000, "values nest too deeply"),
    "a list as a key": ("lr: 1\n? [a, b]\n: 1", "line 2: a value uses a list or a mapping as a key"),
    "a mapping as a key": ("? {a: b}\n: 1", "line 1: a value uses a list or a mapping as a key"),
    "a set": ("data-path: !!set {a, b}", "line 1: a value has the tag !!set"),
    "an object": (
        "lr: !!python/object/apply:os.getcwd []",
        "line 1: a value has the tag !!python/object",
    ),
    "bytes": ("lr: !!binary aGk=", "line 1: a value has the tag !!binary"),
    "an unknown alias": ("lr: *none", "found undefined alias 'none'"),
    "a file too large": ("#" * (MOST_BYTES + 1), "is larger than 16 MiB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_configurations_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text, said = REFUSED[name]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (problem,) = read_flags(["--config", str(file)]).problems
    assert problem.flag == "--config" and f"cannot be read: {said}" in str(problem) and "\n" not in str(problem)


ENTRIES = {
    "data-path: [[a, b], c]": "data-path: must be a value, or a list of values",
    "data-path: [{a: b}, c]": "data-path: must be a value, or a list of values",
    "data-path: {a: b}": "data-path: must be a value, or a list of values",
    "swiglu: !!bool maybe": "swiglu maybe: must be true or false",
    "lr: !!float much": "lr much: must be a number",
}


@pytest.mark.parametrize("text", ENTRIES)
def test_a_value_of_a_wrong_type_is_refused_with_its_key(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (problem,) = read_flags(["--config", str(file)]).problems
    assert ENTRIES[text] in str(problem)


def test_plain_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: &rate 1e-3\nmin-lr: *rate\nswiglu: yes\ndata-path: [0.5, a, true]\nseed: ~\n")
    reader = read_flags(["--config", str(file)])
    assert reader.problems == []
    assert reader.values == {"lr": 1e-3, "min_lr": 1e-3, "swiglu": True, "data_path": ("0.5", "a", "true")}
    assert compose_yaml("# nothing") is None and load_yaml("") is None


@pytest.mark.parametrize("text", ["a: 2020-99-99", "a: !!int x", "a: !!float x", f"a: {'9' * 5000}", "a: !!bool maybe"])
def test_values_that_cannot_be_constructed_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a value cannot be read: "):
        load_yaml(text)


def test_json_without_a_value_is_a_value_error(tmp_path: Path) -> None:
    assert parse_json(b'{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    for text, said in (
        ("[" * 100_000, "nests too deeply"),
        ('{"a":' * 100_000, "nests too deeply"),
        ("9" * 5000, "a number with more than 4,300 digits"),
        ("{", "Expecting"),
        (b"\xff\xfe{", "codec can't decode|Expecting"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_json(text)
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (folder / "metadata.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged: it contains no configuration"):
        saved_metadata(tmp_path)


TYPES: dict[str, tuple[str, Any, str]] = {
    "a section": ("parallel", ["x"], "config.parallel must be an object, but is a list"),
    "a number": ("model", {"num_layers": "two"}, "config.model.num_layers must be a whole number, but is text"),
    "a fraction": ("model", {"num_layers": 2.5}, "config.model.num_layers must be a whole number, but is a number"),
    "a switch": ("model", {"num_layers": True}, "config.model.num_layers must be a whole number, but is true or false"),
    "an object": ("optimizer", {"lr": {}}, "config.optimizer.lr must be a number, but is an object"),
    "nothing": ("model", {"hidden_size": None}, "config.model.hidden_size must be a whole number, but is null"),
    "one of several": (
        "data",
        {"data_path": ["a", {}]},
        "config.data.data_path must contain only values that are text, but contains an object",
    ),
    "several": (
        "data",
        {"data_path": {}},
        "config.data.data_path must be a list of values that are text, but is an object",
    ),
    "a word": ("training", {"swiglu": "yes"}, "config.training.swiglu must be true or false, but is text"),
}


def metadata_of(folder: Path, values: dict[str, Any]) -> None:
    (folder / "iter_0000001").mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    (folder / "iter_0000001" / "metadata.json").write_text(json.dumps(values))


@pytest.mark.parametrize("name", TYPES)
def test_a_saved_value_of_a_wrong_type_is_refused_with_file_and_field(name: str, tmp_path: Path) -> None:
    section, values, said = TYPES[name]
    sections: dict[str, Any] = {"model": {}, "optimizer": {}, "training": {}}
    metadata_of(tmp_path, {"config": sections | {section: values}})
    with pytest.raises(ValueError, match=r"iter_0000001/metadata.json is damaged: ") as found:
        saved_metadata(tmp_path)
    assert said in str(found.value) and "\n" not in str(found.value)


def test_model_of_run_is_checked_and_valid_values_are_used(tmp_path: Path) -> None:
    config = values_by_section(RunConfig()) | {"gone": {"of_an_older_version": [{}]}}
    whole = {"model": config["model"] | {"num_layers": 2.0}}
    metadata_of(tmp_path, {"config": config | whole, "model_of_run": {"num_layers": 2}})
    assert saved_metadata(tmp_path) is not None
    for wrong, said in (
        ([1], "model_of_run must be "),
        ({"num_layers": "x"}, "model_of_run.num_layers must be a whole number, but is text"),
    ):
        with pytest.raises(ValueError, match=f"is damaged: {said}"):
            check_types({"config": config, "model_of_run": wrong}, tmp_path)


def test_texts_that_are_not_numbers_are_refused_with_a_clear_message() -> None:
    with pytest.raises(ValueError, match="is not a list of numbers"):
        layer_numbers("[64]\udcff", 1)
    (problem,) = read_flags(["--lr", "1_000"]).problems
    assert "--lr 1_000: must be a number" in str(problem)
