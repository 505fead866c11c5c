"""Rules of activations in host memory."""

from __future__ import annotations

import pytest

from megatron.training.config.arguments import parse_args, with_flags
from megatron.training.config.validation import resolve, validate
from tests.rules import BASE, problems


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (
            "--cpu-offloading --cpu-offloading-num-layers 15",
            1,
            "--cpu-offloading-num-layers 15: must be in [1, 14], the layers of the longest pipeline stage; nearest: 14",
        ),
        (
            "--cpu-offloading",
            1,
            "--cpu-offloading-num-layers 0: must be in [1, 14], the layers of the longest pipeline stage; nearest: 1",
        ),
        (
            "--cpu-offloading-num-layers 2",
            1,
            "--cpu-offloading-num-layers 2: has no effect without --cpu-offloading; add --cpu-offloading, or remove "
            "--cpu-offloading-num-layers",
        ),
    ],
)
def test_problems(flags: str, world_size: int, expected: str) -> None:
    (found,) = problems(flags, world_size)
    assert found.startswith(expected)


def test_legal() -> None:
    assert problems("--cpu-offloading --cpu-offloading-num-layers 4 --pp 4 --recompute-granularity full", 4) == []


def test_layers_of_uneven_stages_are_judged_when_the_vocabulary_is_known() -> None:
    flags = BASE.replace("--mock-data", "--data-path corpus --tokenizer-type ByteTokenizer")
    flags += " --num-layers 5 --pp 2 --cpu-offloading --cpu-offloading-num-layers 3"
    config = parse_args(flags.split())
    assert config.model.vocab_size is None
    for vocab_size in (None, 256):
        assert not [each for each in validate(resolve(config, 2, vocab_size), 2) if "offloading" in each.flag]
    many = resolve(with_flags(config, ["--cpu-offloading-num-layers", "5"]), 2, 256)
    assert [each.flag for each in validate(many, 2) if "offloading" in each.flag] == ["--cpu-offloading-num-layers"]


def test_a_layout_that_is_wrong_is_reported_by_its_own_rule() -> None:
    assert not any("offloading" in problem for problem in problems("--cpu-offloading --pp 0", 1))
