"""Periodic task that saves a checkpoint and ends the run before the disk of --save is full.

python pretrain_gpt.py --extension examples/disk_space.py --least-free-gib 500 --save runs/a ...
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, Problem, extension_flags
from megatron.training.hooks import Callback, Log, Task
from megatron.training.run import TrainingRun


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.checkpoint.save is None:
        yield Problem("--least-free-gib", None, "looks at the folder of --save", "add --save")


@extension_flags("disk space", may_change=True, rules=rules)
@dataclass(frozen=True)
class DiskSpaceConfig:
    least_free_gib: float = flag(0.0, at_least=0)
    """Save a checkpoint and end the run when the disk of --save has less free space than this, in GiB; 0 disables the
    check."""

    disk_space_interval: int = flag(100, above=0)
    """Number of iterations between two checks of the free disk space."""


@CALLBACKS.register("disk space", when=lambda config: config.options(DiskSpaceConfig).least_free_gib > 0)
class DiskSpace(Callback):
    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        options = self.config.options(DiskSpaceConfig)

        def look() -> None:
            free = shutil.disk_usage(str(self.config.checkpoint.save)).free / 2**30
            log.write({"iteration": run.progress.iteration, "free_gib": free})
            if free < options.least_free_gib:
                run.stop(f"{free:.0f} GiB are free in --save, less than --least-free-gib {options.least_free_gib:g}")

        return (Task("disk space", options.disk_space_interval, look, reads_result=False, may_stop=True),)
