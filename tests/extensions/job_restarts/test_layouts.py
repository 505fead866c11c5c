"""Test that a job that continues on fewer ranks chooses a valid layout with the same batch size. The job keeps the
layout of the run if no other layout is better."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.extensions import load
from megatron.extensions.operate.job_restarts import layouts
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate
from tests.tiny import TINY


def config_of(flags: str) -> RunConfig:
    load()
    return parse_args(f"{TINY} --global-batch-size 12 {flags}".split())


def choice_of(config: RunConfig, ranks: int) -> layouts.Choice:
    found = layouts.smaller_layout(config, ranks, layouts.device_here())
    assert found is not None
    return found


def test_without_time_to_search_the_layout_loses_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SEARCH", 0.0)
    found = choice_of(config_of("--tp 2"), 7)
    assert (found.ranks, found.layout.dp, found.layout.family.tp) == (6, 3, 2)
    found = choice_of(config_of("--tp 2 --pp 2"), 3)
    assert found.ranks == 3 and found.seconds == float("inf")


def test_a_search_finds_a_legal_layout_of_the_same_batch() -> None:
    config = config_of("--tp 2 --pp 2")
    found = choice_of(config, 3)
    assert layouts.layout_from(layouts.layout_text(found.layout)) == found.layout
    other = layouts.config_in(config, found.ranks, found.layout)
    assert not validate(other, found.ranks)
    assert other.training.global_batch_size == config.training.global_batch_size == 12
    assert "--tensor-model-parallel-size" in layouts.flags_of(config, found.ranks, found.layout)


def test_the_device_is_read_from_the_driver(tmp_path: Path) -> None:
    assert layouts.device_here(tmp_path).name == layouts.read_device(layouts.DEFAULT_DEVICE).name
    (tmp_path / "0000").mkdir()
    (tmp_path / "0000" / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\n")
    assert layouts.device_here(tmp_path).name == layouts.read_device("a100").name
