"""Create a SLURM array job with one task per rung. This module does not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

SCRIPT = "ladder.sbatch"
RUNG = "<rung>"
"""Placeholder in a command for the number of a rung, which is one run of a ladder."""


def job_script(folder: Path, rungs: int, options: Sequence[str], command: Sequence[str]) -> str:
    """Return the text of an sbatch script that runs each rung of a ladder as a task of a job array. `command` runs one
    rung; it contains the placeholder `RUNG` instead of the number of the rung. The script can be submitted again, and
    its tasks can be requeued: each task resumes its rung."""
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=ladder-{folder.name}",
        f"#SBATCH --array=0-{rungs - 1}",
        f"#SBATCH --output={folder / 'slurm-%A_%a.log'}",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@240",
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        "exec " + " ".join('"$SLURM_ARRAY_TASK_ID"' if word == RUNG else shlex.quote(word) for word in command),
    ]
    return "\n".join(lines) + "\n"
