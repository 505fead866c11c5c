"""Tests of the files that a save writes under different layouts, and of the files that an interrupted save leaves
behind. Loading is tested in tests/parity/test_reshard.py."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.dist_checkpointing.state_dict import model_key, model_state, optimizer_key, optimizer_state
from megatron.core.dist_checkpointing.storage import Checkpoint, save
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState, build_parallel_state, initialize_model_parallel
from megatron.core.param_meta import ParamMeta
from megatron.training.checkpoints.loading import candidates
from tests.dist.toy import build, catalogue, noise
from tests.harness import run_world

LAYOUTS = [
    (ParallelDims(dp=4), False, "fp32"),
    (ParallelDims(tp=2, dp=3), True, "fp32"),
    (ParallelDims(tp=2, pp=2), False, "fp32"),
    (ParallelDims(pp=3), True, "fp32"),
    (ParallelDims(tp=2, dp=2), True, "bf16"),
]


def save_at(rank: int, world_size: int, root: Path, dims: ParallelDims, sharded: bool, dtype: str) -> None:
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, sharded, dtype)
    tensors = model_state(ddp.modules, state) | optimizer_state(optimizer.sharded_state(), state, sharded)
    save(root, 7, tensors, {}, state.world)


@pytest.mark.parametrize(("dims", "sharded", "dtype"), LAYOUTS, ids=str)
def test_each_element_is_written_once(tmp_path: Path, dims: ParallelDims, sharded: bool, dtype: str) -> None:
    run_world(dims.world_size, save_at, tmp_path, dims, sharded, dtype)
    checkpoint = Checkpoint(candidates(tmp_path).folders[0])
    metas, precision = (
        {meta.name: meta for meta, _ in catalogue()},
        torch.bfloat16 if dtype == "bf16" else torch.float32,
    )
    kinds = ["exp_avg", "exp_avg_sq", *(["main_param"] if dtype == "bf16" else [])]
    expected = {model_key(name): precision.itemsize * meta.numel for name, meta in metas.items()}
    expected |= {optimizer_key(kind, name): 4 * meta.numel for kind in kinds for name, meta in metas.items()}
    assert {key: info.nbytes for key, info in checkpoint.tensors.items()} == expected
    for name, meta in metas.items():
        whole = noise(meta.global_shape, name)
        assert torch.equal(checkpoint.read(model_key(name)), whole.to(precision))


def module_of(*metas: ParamMeta) -> nn.Module:
    module = nn.Module()
    for meta in metas:
        param = nn.Parameter(torch.zeros(meta.global_shape))
        param.meta = meta  # type: ignore[attr-defined]
        module.register_parameter(meta.name, param)
    return module


def misfit(rank: int, world_size: int, root: Path) -> str:
    """Try to load a missing key on rank 0 and a tensor of the wrong shape on rank 1, and return the error message. On
    every rank, the message must name both errors."""
    state = initialize_model_parallel()
    module = module_of(ParamMeta(f"of_rank_{rank}" if rank == 0 else "b", (3,), role="vector"))
    with pytest.raises(ValueError, match="does not fit") as error:
        Checkpoint(candidates(root).folders[0]).load(model_state([module], state), state.world)
    return str(error.value)


def test_missing_and_misshapen_keys_are_named_on_every_rank(tmp_path: Path) -> None:
    module = module_of(ParamMeta("a", (2,), role="vector"), ParamMeta("b", (2,), role="vector"))
    save(tmp_path, 1, model_state([module], ParallelState()), {}, Axis())
    messages = run_world(2, misfit, tmp_path)
    assert messages[0] == messages[1]
    assert "1 missing from the checkpoint: model.of_rank_0" in messages[0]
    assert "1 in the checkpoint but not in the run: model.a" in messages[0]
    assert "model.b (2,) in the checkpoint, (3,) in the run" in messages[0]


def save_weights(rank: int, world_size: int, root: Path, iteration: int = 1, dies_in: tuple[str, str] | None = None):
    """Save the weights. `dies_in` is an optional pair (name of a function in `os`, path suffix). If the pair is given,
    rank 0 is killed when it calls this function for a path that ends with the suffix."""
    if dies_in is not None and rank == 0:
        method, suffix = dies_in
        original = getattr(os, method)

        def dies(source: Path, target: Path) -> None:
            if Path(source).name.endswith(suffix):
                os.kill(os.getpid(), signal.SIGKILL)
            original(source, target)

        setattr(os, method, dies)
    state = initialize_model_parallel()
    payload = {"from": "the killed"} if dies_in else {}
    save(root, iteration, model_state([module_of(ParamMeta("a", (9,), role="vector"))], state), payload, state.world)


KILLED = {
    "before the rename": (("rename", ".tmp"), 2),
    "between rename and latest": (("replace", "txt.tmp"), 2),
    "while one of the same number is replaced": (("rename", ".tmp"), 1),
}


@pytest.mark.parametrize(("dies_in", "iteration"), KILLED.values(), ids=KILLED.keys())
def test_a_killed_save_leaves_the_latest_loadable(tmp_path: Path, dies_in: tuple[str, str], iteration: int) -> None:
    run_world(2, save_weights, tmp_path)
    with pytest.raises(RuntimeError):
        run_world(2, save_weights, tmp_path, iteration, dies_in)
    assert read_latest(tmp_path) == 1
    folder = candidates(tmp_path).folders[0]
    assert json.loads((folder / "metadata.json").read_text()) == {}
    assert Checkpoint(folder).read("model.a").shape == (9,)
    run_world(2, save_weights, tmp_path)  # this save also removes files that the killed save left
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".tmp", ".old")]
