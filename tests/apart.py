"""Run test code in separate Python processes, for tests that cannot run in a fork of the pytest process."""

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
"""Variables that a launcher may have set for this process and that its child processes must not inherit."""


def checked(done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
    """Assert that a finished process exited with `code`, unless `code` is None, and return `done`."""
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_command(
    command: Sequence[object], code: int | None = None, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture stdout and stderr. Assert that the command exits with `code`, unless `code` is None."""
    words = [str(word) for word in command]
    return checked(subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG), code)


def python_apart(*command: str, code: int | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND...` with the repository on the module path and the additional environment variables
    `environ`. Assert that the process exits with `code`, unless `code` is None."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment = own | {"PYTHONPATH": os.pathsep.join(folders)} | environ
    return run_command([sys.executable, *command], code, env=environment)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_in(metrics: Path) -> list[float]:
    """Read a metrics file, and return the training loss of each logged step."""
    return [record["lm_loss"] for record in read_records(metrics) if "lm_loss" in record]
