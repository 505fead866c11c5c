"""A checkpoint with megatron-core's tensor names and shapes is bit-identical after it is read and written again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.storage import Checkpoint
from tests.extensions.megatron_checkpoints.their_runs import FIXTURES, convert

LISTINGS = json.loads((FIXTURES / "listings.json").read_text())

STATES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.param.")


def as_they_save(name: str, folder: Path) -> Path:
    """Save a checkpoint of iteration 1 with random values, as megatron-core does. The main parameters are equal to the
    model's parameters."""
    listing, checkpoint = LISTINGS[name], folder / "iter_0000001"
    draw = torch.Generator().manual_seed(0)
    tensors = {
        prefix + key: torch.randn(shape, generator=draw)
        for prefix in STATES[:-1]
        for key, shape in listing["tensors"].items()
        if not prefix or not key.endswith(("expert_bias", "tid2eid"))
    }
    for key in (key for key in tensors if key.endswith("tid2eid")):
        tensors[key] = torch.randint(listing["args"]["num_experts"], tensors[key].shape, generator=draw).int()
    moments = [key.removeprefix(STATES[1]) for key in tensors if key.startswith(STATES[1])]
    tensors |= {STATES[-1] + key: tensors[key] for key in moments}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(checkpoint), no_dist=True)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    args = argparse.Namespace(**listing["args"], consumed_train_samples=4, global_batch_size=4, train_iters=2, lr=0.01)
    optimizer = {"optimizer": {"param_groups": [{"step": 1}]}}
    torch.save({"args": args, "iteration": 1, "optimizer": optimizer}, checkpoint / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", LISTINGS)
def test_round_trip_keeps_megatron_names(name: str, tmp_path: Path) -> None:
    theirs = as_they_save(name, tmp_path / "theirs")
    convert("--input", theirs, "--output", tmp_path / "ours")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "back", "--to", "megatron")
    before, after = (Checkpoint(folder / "iter_0000001") for folder in (theirs, tmp_path / "back"))
    for key, info in before.tensors.items():
        assert after.tensors[key].shape == info.shape, key
        assert torch.equal(after.read(key), before.read(key)), key
