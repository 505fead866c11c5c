"""Rules of activations in host memory."""

from __future__ import annotations

from megatron.training.config.arguments import parse_args, with_flags
from megatron.training.config.validation import resolve, validate
from tests.rules import BASE, problems


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
