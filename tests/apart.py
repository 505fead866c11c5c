"""Python processes of their own, for what cannot run in a fork of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.limits import HANG

ROOT = Path(__file__).parents[1]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
"""Variables of a launcher around this process, which are not meant for what it starts."""


def checked(done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
    """`done`. Asserts that it has exited with `code`, if there is one."""
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_command(
    command: Sequence[object], code: int | None = None, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command, which has to exit with `code`, if that is not None. Both outputs are kept."""
    words = [str(word) for word in command]
    return checked(subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG), code)


def python_apart(*command: str, code: int | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python COMMAND...`, which finds the modules of the repository and has to exit with `code`; `environ` are further
    variables."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment = own | {"PYTHONPATH": os.pathsep.join(folders)} | environ
    return run_command([sys.executable, *command], code, env=environment)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_in(metrics: Path) -> list[float]:
    """The losses of the training steps that a file of metrics has."""
    return [record["lm_loss"] for record in read_records(metrics) if "lm_loss" in record]
