"""Fixture for the tests of inference. The fixture provides the checkpoint of a briefly trained model, which generates
varied tokens."""

from __future__ import annotations

import pytest

from tests.forked import run_forked

TRAINING = """--cpu --fp64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --mock-data
    --init-method-std 0.3 --tokenizer-type ByteTokenizer --train-iters 1 --lr 1e-3 --global-batch-size 2
    --eval-iters 0 --num-workers 0""".split()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    run_forked(1, [*TRAINING, "--save", str(folder)], folder.with_name("screen"))
    return str(folder)
