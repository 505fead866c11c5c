"""A run resolves its configuration and builds its tokenizer only once, at startup."""

from __future__ import annotations

import pytest

from megatron.core.config.data import TOKENIZERS, TokenizerConfig
from megatron.core.tokenizers import ByteTokenizer, Tokenizer
from megatron.testing.local_run import local_run
from megatron.training.config import validation
from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import load_config, prepare
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch
from tests.harness import run_world
from tests.tiny import TINY

FLAGS = [*TINY.replace("--vocab-size 50 ", "").split(), "--tokenizer-type", "Counted"]


def test_a_start_resolves_once_and_builds_the_tokenizer_once() -> None:
    run_world(1, start)


def start(rank: int, world_size: int) -> None:
    resolved, built = list[RunConfig](), list[int | None]()
    before = validation._resolve_training

    def resolve(config: RunConfig, world_size: int) -> object:
        resolved.append(config)
        return before(config, world_size)

    def build(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
        built.append(vocab_size)
        return ByteTokenizer()

    TOKENIZERS.register("Counted", build)
    validation._resolve_training = resolve
    config = prepare(command_line(FLAGS, Launch()), Launch())
    with local_run(config, rank, world_size) as run:
        assert run.config.model.vocab_size == ByteTokenizer.vocab_size
    assert len(resolved) == 1 and built == [None]


def test_a_program_loads_a_configuration_with_its_problems(capsys: pytest.CaptureFixture[str]) -> None:
    config, problems = load_config(TINY.split())
    assert not problems and config.training.num_microbatches == 4
    _, problems = load_config([*TINY.split(), "--tensor-model-parallel-size", "3", "--clip-grad", "-1"])
    assert {"world size", "--clip-grad"} <= {problem.flag for problem in problems}
    _, problems = load_config([*TINY.split(), "--no-such-flag"])
    assert [(problem.flag, problem.rule) for problem in problems] == [("--no-such-flag", "unknown flag")]
    assert capsys.readouterr() == ("", "")
