"""Flags for copies of the training state in the memory of other hosts. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    copies = config.options(PeerCopyConfig).peer_copies
    save, load = config.checkpoint.save_root, config.checkpoint.load_root
    if copies and (save is None or load != save):
        rule = "needs --save and --load with the same folder, from which a run resumes if its copies are lost"
        yield Problem("--peer-copies", copies, rule, "give --save DIR --load DIR")


@extension_flags("copies in memory", may_change=True, rules=rules)
@dataclass(frozen=True)
class PeerCopyConfig:
    peer_copies: int = flag(0, at_least=0)
    """Number of hosts, in addition to a rank's own host, that hold a copy of the rank's training state in memory. A
    restart loads these copies instead of an older checkpoint. Set to 0 to disable copies."""

    peer_copy_interval: int = flag(1, at_least=1, no_effect_without="--peer-copies above 0")
    """Number of steps between two copies of the training state."""

    peer_copy_bandwidth: float | None = flag(None, above=0, no_effect_without="--peer-copies above 0")
    """Limit in MB/s on the total bandwidth that the ranks of a host use to send copies. Default: no limit."""

    peer_copy_path: str = flag("/dev/shm", path="local", no_effect_without="--peer-copies above 0")
    """Folder on an in-memory file system in which each host stores copies."""

    peer_copy_keep_minutes: float = flag(10.0, above=0, no_effect_without="--peer-copies above 0")
    """Number of minutes that a host keeps its copies after the last rank of the run on this host has ended."""

    def plan_section(self, config: RunConfig) -> tuple[str, str] | None:
        """Return the title of the plan section about copies in memory, and the entry point of the function that yields
        the lines of this section. Return None if the run makes no copies."""
        return ("Copies in memory", f"{__package__}.plan_lines:lines") if keeps_copies(config) else None


def keeps_copies(config: RunConfig) -> bool:
    """Return True if a run copies its state to other hosts."""
    return config.options(PeerCopyConfig).peer_copies > 0 and not config.training.skip_train


def trains_without_copies(config: RunConfig) -> bool:
    """Return True if a run saves checkpoints but does not copy its state to other hosts."""
    wanted = config.options(PeerCopyConfig).peer_copies > 0
    return config.checkpoint.save is not None and not (wanted or config.training.skip_train)


CALLBACKS.register("peer copies", f"{__package__}.hooks:PeerCopies", when=keeps_copies)
CALLBACKS.register("no peer copies", f"{__package__}.runs_without:DropsIdentity", when=trains_without_copies)
