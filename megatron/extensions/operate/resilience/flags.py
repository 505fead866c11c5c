"""Flags for host heartbeats, and for files that stop a run. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

SHORTEST_SILENCE = 3.0
"""Minimum value of --host-heartbeat-timeout-seconds. The value 0, which disables heartbeats, is also allowed."""


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(ResilienceConfig)
    seconds, least = own.host_heartbeat_timeout_seconds, SHORTEST_SILENCE
    if 0 < seconds < least:
        rule = f"must be 0 or at least {least:g}, because single heartbeats (four per second) may be lost"
        remedy = "the default is 6; 0 disables heartbeats"
        yield Problem("--host-heartbeat-timeout-seconds", seconds, rule, remedy)


@extension_flags("hosts", may_change=True, rules=rules)
@dataclass(frozen=True)
class ResilienceConfig:
    host_heartbeat_timeout_seconds: float = flag(6.0, at_least=0)
    """Number of seconds without a heartbeat (UDP) from another host after which the run ends and reports this host. Set
    to 0 to disable heartbeats."""


def rules_of_stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(StopFileFlags)
    switch = own.kill_switch_path
    if switch and Path(switch).is_dir():
        yield Problem("--kill-switch-path", switch, "is a folder but must be a file", "add a file name to the path")


@extension_flags("stop files", may_change=True, rules=rules_of_stop_file)
@dataclass(frozen=True)
class StopFileFlags:
    kill_switch_path: str | None = flag(None, "--kill-switch-file", path="local")
    """Save and exit as soon as this file exists."""

    trigger_path: str | None = flag(None, path="local")
    """Folder in which the run looks for the files `save` (save a checkpoint) and `exit` (save and exit), in addition to
    --save."""

    def folders(self, config: RunConfig) -> list[Path]:
        """Return the folders in which the run looks for trigger files: the --save folder and --trigger-path, if set."""
        return [Path(folder) for folder in (config.checkpoint.save_folder, self.trigger_path) if folder]


CALLBACKS.register("hosts and folders", f"{__package__}.watches:HostsAndFolders")
CALLBACKS.register(
    "shared folder",
    f"{__package__}.save_folder:SharedFolder",
    when=lambda config: config.checkpoint.save_folder is not None and not config.training.skip_train,
)
