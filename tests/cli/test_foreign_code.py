"""Tests of extensions that are named in files. No command runs an extension of unknown origin only because a file names
it. Runs that the user started on this machine need no additional flag."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.forked import run_program

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 257 --lr 1e-2 --cpu "
    "--mock-data --tokenizer-type ByteTokenizer --train-iters 2 --eval-iters 0 --activation-func mine"
).split()

SOURCE = """
import os
from megatron.core.config.activations import ACTIVATIONS

open(os.environ["RAN"], "w").close()

@ACTIVATIONS.register("mine")
def build(name, config, ctx):
    return lambda x: x * x
"""

GENERATE = "tools/generate_text.py --load {run} --prompt ab --max-new-tokens 2"
HELP = "pretrain_gpt.py --config {run}/run_config.yaml --help activation"
REFUSED = (
    GENERATE,
    HELP,
    "pretrain_gpt.py --config {run}/run_config.yaml --load {run}",
    "tools/convert_checkpoint.py --input {run} --output {run}/hf",
    "tools/replay_step.py {run}/nan/iter_0000002",
    "tools/serve.py --load {run} --port 0",
    "tools/translate_flags.py {run}/train.sh",
)
HARMLESS = ("tools/report.py {run}", "tools/inspect_checkpoint.py {run}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that uses an extension, and copy its files to the folder `downloaded`, as if another user had
    downloaded them."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "own.py").write_text(SOURCE)
    train = [*FLAGS, "--extension", str(folder / "own.py"), "--save", str(folder / "run")]
    run_program("pretrain_gpt.py", *train, code=0, RAN=str(folder / "ran"))
    shutil.copytree(folder / "run", folder / "downloaded")
    step = folder / "downloaded" / "nan" / "iter_0000002"
    shutil.copytree(folder / "run" / "iter_0000002", step)
    shutil.copyfile(folder / "run" / "run_config.yaml", step / "run_config.yaml")
    saved = {"step": {"iteration": 2, "first_sample": 1, "samples": 1}, "loss_scale": 1.0, "finding": None}
    (step / "finding.json").write_text(json.dumps(saved))
    script = f"torchrun pretrain_gpt.py --num-layers 2 --extension {folder / 'own.py'}\n"
    (folder / "downloaded" / "train.sh").write_text(script)
    return folder


@pytest.mark.parametrize("command", [*REFUSED, *HARMLESS], ids=lambda command: " ".join(command.split()[:2]))
def test_foreign_files_run_no_code(command: str, folder: Path, tmp_path: Path) -> None:
    words = command.format(run=folder / "downloaded").split()
    done = run_program(*words, code=2 if command in REFUSED else 0, RAN=str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()
    if command in REFUSED:
        assert f"names the extension {folder / 'own.py'}; extension code runs only if the command line" in done.stderr
        assert f"read it, then add --extension {folder / 'own.py'}" in done.stderr


@pytest.mark.parametrize("command", [GENERATE, HELP])
def test_extensions_named_on_the_command_line_run(command: str, folder: Path, tmp_path: Path) -> None:
    words = command.format(run=folder / "downloaded").split()
    run_program(*words, "--extension", folder / "own.py", code=0, RAN=str(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", [GENERATE, HELP])
def test_the_users_own_run_needs_no_flag(command: str, folder: Path, tmp_path: Path) -> None:
    run_program(*command.format(run=folder / "run").split(), code=0, RAN=str(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
