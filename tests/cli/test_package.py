"""`pip install .` brings the library, the training loop and the command, and pinned versions are in its ranges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `pip install .` filled, from a copy of the tree, as building leaves files behind."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_module_is_installed(installed: Path) -> None:
    here = {path.relative_to(ROOT) for path in [*ROOT.glob("megatron/**/*.py"), ROOT / "pretrain_gpt.py"]}
    there = {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert here
    assert here - there == set()


def test_installed_command_trains(installed: Path, tmp_path: Path) -> None:
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --mock-data --cpu "
        "--train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 --metrics-file metrics.jsonl"
    )
    command = [sys.executable, str(installed / "bin/pretrain_gpt"), *flags.split()]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_pinned_versions_cover_what_setup_asks_for() -> None:
    files = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    pinned = set(re.findall(r"^([\w.-]+)==", "".join(file.read_text() for file in files), re.MULTILINE))
    asked = set(re.findall(r'"([\w.-]+)>=', (ROOT / "setup.py").read_text()))
    assert asked - pinned == {"wandb"}
    assert "\ntorch==2.13.0\n" in (ROOT / "requirements.txt").read_text()
