"""Tests of the presets in configs/. Each preset is valid for the number of ranks that its header states, and has the
stated number of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.training.config.arguments import command_line, parse_args, with_flags
from megatron.training.config.prepare import prepare
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import notices, resolve, validate
from megatron.training.reliability.launch import Launch
from tests.tiny import TINY

T = TypeVar("T")
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
HEAD = re.compile(r"^# For ([\d,]+) GPUs?\b.*; ([\d,]+) parameters with a vocabulary of ([\d,]+)\.$", re.MULTILINE)


def stated(path: Path) -> tuple[int, int, int]:
    """Read the header of a preset, and return the stated number of ranks, number of parameters and vocabulary size."""
    found = HEAD.search(path.read_text(encoding="utf-8"))
    assert found is not None, path
    ranks, parameters, vocabulary = (int(number.replace(",", "")) for number in found.groups())
    return ranks, parameters, vocabulary


def size_of(name: str) -> float:
    """Return the number of parameters that is part of a preset's name, such as `8b` or `30b-a3b`."""
    number, unit = re.fullmatch(r"([\d.]+)([mb])(?:-a\d+b)?", name).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 1e6, "b": 1e9}[unit]


def test_presets_range_from_10m_to_405b() -> None:
    sizes = sorted(size_of(path.stem) for path in CONFIGS)
    assert (sizes[0], sizes[-1]) == (1e7, 4.05e11) and len(sizes) > 10


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_preset_is_valid_and_has_its_size(path: Path) -> None:
    ranks, parameters, vocabulary = stated(path)
    planned = command_line(["--config", str(path), "--dry-run", "--world-size", str(ranks)])
    assert planned.notes == ("no data are given: the plan uses synthetic data, as with --mock-data",)
    config = planned.config
    assert config.model.default_vocab_size == vocabulary and config.model.vocab_size is None
    assert validate(config, ranks) == [] and notices(config, ranks) == []
    config = resolve(config, ranks)
    assert config.model.vocab_size == vocabulary
    assert count_parameters(config.model).total == parameters
    assert parameters == pytest.approx(size_of(path.stem), rel=0.25)
    assert not {"data-path", "tokenizer-model", "vocab-size", "save", "load"} & yaml.safe_load(path.read_text()).keys()


ONE_GPU = sorted((CONFIGS[0].parent / "one_gpu").glob("*.yaml"), key=lambda path: int(path.stem.removesuffix("gb")))


def planned_gib(path: Path) -> float:
    """Return the memory in GiB that the planner computes for a one-rank preset."""
    memory_of_ranks = pytest.importorskip("megatron.extensions.plan.planner.memory").memory_of_ranks
    config = resolve(command_line(["--config", str(path), "--dry-run", "--world-size", "1"]).config, 1)
    (rank,) = memory_of_ranks(config, 1)
    return rank.total / 2**30


def test_one_gpu_presets_are_the_largest_that_fit() -> None:
    """The models must leave 0.5 GiB of a GPU's memory for CUDA, and 3 % for fragmentation of the allocator."""
    needed = {int(path.stem.removesuffix("gb")): planned_gib(path) for path in ONE_GPU}
    room = {size: 0.97 * size - 0.5 for size in needed}
    assert list(needed) == [8, 12, 16, 24, 48]
    assert all(needed[size] <= room[size] for size in needed), needed
    assert all(needed[larger] > room[size] for size, larger in pairwise(needed)), needed


@pytest.mark.parametrize("path", ONE_GPU, ids=lambda path: path.stem)
def test_a_one_gpu_preset_is_valid_and_has_its_size(path: Path) -> None:
    ranks, parameters, vocabulary = stated(path)
    config = command_line(["--config", str(path), "--dry-run", "--world-size", "1"]).config
    assert ranks == 1 and validate(config, 1) == [] and notices(config, 1) == []
    config = resolve(config, 1)
    assert (count_parameters(config.model).total, config.model.vocab_size) == (parameters, vocabulary)


def test_a_given_vocabulary_or_tokenizer_overrides_a_preset() -> None:
    preset = ["--config", str(CONFIGS[0])]
    named = resolve(with_flags(RunConfig(), [*preset, "--mock-data", "--vocab-size", "700"]), 1)
    assert named.model.vocab_size == 700
    of_bytes = with_flags(RunConfig(), [*preset, "--data-path", "x.txt", "--tokenizer-type", "ByteTokenizer"])
    assert resolve(of_bytes, 1, 257).model.vocab_size == 257
    ids = with_flags(RunConfig(), [*preset, "--data-path", "x.txt", "--tokenizer-type", "NullTokenizer"])
    assert resolve(ids, 1).model.vocab_size == ids.model.default_vocab_size
    without_data = [problem.flag for problem in validate(with_flags(RunConfig(), preset), 1)]
    assert without_data == ["--data-path"], "a run must name its data, but a plan need not"


def some(items: Iterable[T], most: int) -> list[T]:
    """Return at most `most` evenly spaced items of `items`."""
    everything = list(items)
    return everything[:: -(-len(everything) // most)] if everything else []


def check_suggestions(own: list[str], ranks: int) -> None:
    """Append the flags of suggested layouts to the run's own flags, as a user would with the output of --suggest, and
    check that the result is valid."""
    run = pytest.importorskip("megatron.extensions.plan.planner.suggest.space").SearchedRun(
        resolve(parse_args(own), ranks), ranks
    )
    layouts = [layout for family in some(run.space.families(), 6) for layout in some(run.space.layouts(family), 5)]
    configs = [config for config in map(run.with_layout, layouts) if not validate(config, ranks)]
    assert configs
    for config in configs:
        pasted = resolve(parse_args([*own, *run.flags(config)]), ranks)
        assert validate(pasted, ranks) == [], run.flags(config)
        # recompute_modules is ignored, because it has no effect without selective recomputation.
        if pasted.model.recompute_granularity != "selective":
            pasted = replace(pasted, model=replace(pasted.model, recompute_modules=config.model.recompute_modules))
        assert replace(pasted, given=config.given) == config


@pytest.mark.grid("path", CONFIGS[::4], CONFIGS)
def test_suggested_flags_can_be_appended_to_a_preset(path: Path) -> None:
    check_suggestions(["--config", str(path), "--mock-data"], stated(path)[0])


def test_suggested_flags_override_stage_sizes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = (CONFIGS[0].parent / "70b.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("num-virtual-stages-per-pipeline-rank: 4", "num-layers-per-virtual-pipeline-stage: 5"))
    assert "stage: 5" in file.read_text()
    check_suggestions(["--config", str(file), "--mock-data"], 96 * 4)


@pytest.mark.parametrize(("stated", "noted"), [(99, True), (257, False), (300, False)])
def test_a_vocabulary_below_the_tokenizers_is_noted(
    stated: int, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{TINY} --tokenizer-type ByteTokenizer --vocab-size {stated} --dry-run".split()
    with pytest.raises(SystemExit):
        prepare(command_line(flags, Launch()), Launch())
    said = f"--vocab-size {stated}: has no effect, because it is smaller than the tokenizer's vocabulary of 257"
    assert (said in capsys.readouterr().err) == noted
