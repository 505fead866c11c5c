"""Read the sbatch options in the #SBATCH lines of a job script, and derive the variables that Slurm sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

FULL_NAMES = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus"}
"""Long form of the short sbatch options that determine SLURM variables."""

VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--gpus": ("SLURM_GPUS",),
}
"""Environment variables that Slurm sets to the number in an sbatch option, keyed by option."""


def batch_options(text: str) -> Iterator[list[str]]:
    """Yield the words of each option in the #SBATCH lines that precede the first command of a script."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            words = line.split()[1:]
        starts = [at for at, word in enumerate(words) if word.startswith("-")]
        for at, end in zip(starts, [*starts[1:], len(words)], strict=True):
            yield words[at:end]


def slurm_variables(batch: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the values of the Slurm variables that the given sbatch options determine, keyed by variable. Options with
    a range, such as --nodes=2-4, determine no variable."""
    numbers: dict[str, int] = {}
    for option in batch:
        found = re.fullmatch(r"(--[\w-]+|-[NncG])(?:[= ]?(.*))", " ".join(option))
        if not found:
            continue
        name = FULL_NAMES.get(found[1], found[1])
        count = re.fullmatch(r"(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d{1,9})", found[2])
        if name in VARIABLES and count and (name != "--gres" or found[2].startswith("gpu:")):
            numbers[name] = int(count[1])
        else:
            numbers.pop(name, None)
    if "--ntasks" not in numbers and {"--nodes", "--ntasks-per-node"} <= numbers.keys():
        numbers["--ntasks"] = numbers["--nodes"] * numbers["--ntasks-per-node"]
    return {variable: str(number) for name, number in numbers.items() for variable in VARIABLES[name]}
