"""Sharded checkpoints that load at any layout: `state_dict` defines what is saved, `storage` how."""

from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint, verify
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import load_targets, model_state, optimizer_state
from megatron.core.dist_checkpointing.storage import (
    Checkpoint,
    CheckpointError,
    checkpoint_folder,
    find_checkpoint,
    read_latest,
    save,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ShardedBoxes",
    "checkpoint_folder",
    "choose_checkpoint",
    "find_checkpoint",
    "load_targets",
    "model_state",
    "optimizer_state",
    "read_latest",
    "save",
    "verify",
]
