"""What tests share: forked gloo worlds, and training steps in them from a list of flags."""

from __future__ import annotations

from megatron.testing.local_world import run_world
from megatron.testing.snapshot import Snapshot, train_in_world

__all__ = ["Snapshot", "run_world", "train_in_world"]
