"""Training requires only torch and numpy. It therefore also runs on a GPU machine on which no packages can be
installed."""

from __future__ import annotations

import sys

from tests.apart import run_command
from tests.tiny import TINY

MISSING = (
    *("tqdm", "yaml", "sentencepiece", "tensorboard", "tokenizers", "safetensors", "zstandard", "matplotlib"),
    *("transformers", "hypothesis", "pytest", "wandb"),
)
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))  # an import of None is one of a module that is not there
from pretrain_gpt import main
sys.exit(main(sys.argv[1:]))
"""
FLAGS = f"{TINY} --train-iters 1"


def test_torch_and_numpy_are_enough() -> None:
    command = [sys.executable, "-c", PROGRAM, *FLAGS.split()]
    assert "lm loss: " in run_command(command, code=0).stdout
