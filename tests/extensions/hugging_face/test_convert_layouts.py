"""Tests of conversion in combination with parallel runs. A Hugging Face folder is converted to a checkpoint. A parallel
run loads the checkpoint and saves it again, and the saved checkpoint is converted back. The resulting folder must be
byte-identical to the original folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.pipeline_parallel.layout import Stage, split_layers
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.extensions.interop.conversion.convert import Conversion
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.safetensors_file import FileTensor
from megatron.extensions.interop.hugging_face.weights import HFWeights
from megatron.training.checkpoints.checkpointing import RunCheckpoint, load_start
from megatron.training.checkpoints.loading import candidates, saved_config
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.progress import Progress
from tests.extensions.hugging_face.hf_exact import save_model
from tests.extensions.hugging_face.hf_models import CASES, assert_same_weights, weights_in
from tests.extensions.hugging_face.whole_models import shard_of
from tests.harness import run_world
from tools.inspect_checkpoint import differences

pytest.importorskip("transformers")


def load_and_save(rank: int, world_size: int, saved: RunConfig, load: Path, new: Path) -> tuple[Progress, int]:
    """Start a run from the weights in `load`, and save a checkpoint. The layout is TP 2 and PP 2, with EP 2 for models
    with an even number of experts."""
    count = saved.model.num_experts
    experts = 2 if count and count % 2 == 0 else 1
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=2 // experts,
        sequence_parallel=count is not None,
        bf16=saved.parallel.bf16,
    )
    config = replace(
        saved,
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-2),
        checkpoint=CheckpointConfig(load=str(load), save=str(new)),
    )
    state = initialize_model_parallel(2, 2, 1, experts, 2 // experts)
    stage, model = state.pp.rank, config.model
    layers = split_layers(model.num_layers, 2, 1.0, 1.0)[stage]
    tied = tied_stages(model, pipeline_layout(model, parallel))
    part = GPTModel(model, parallel, state, Stage(layers, stage == 0, stage == 1, tied))
    ddp = DistributedDataParallel(config.ddp, parallel, state, [part])
    optimizer = DistributedOptimizer(config.optimizer, ddp, state)
    checkpoint = RunCheckpoint(config, state, {stage: part}, optimizer)
    progress = load_start(checkpoint)
    checkpoint.save(replace(progress, iteration=1))
    return progress, optimizer.step_count


PART = (
    *("gpt2", "bloom", "llama3", "mixtral-window", "gemma3", "gpt-neox", "deepseek-v2", "llama4", "mimo-v2-flash"),
    *("qwen3-moe", "qwen3-next", "axk2", "gemma4"),
)
"""Families that together use every way of storing projections, experts and norms."""


@pytest.mark.grid("case", PART, list(CASES))
def test_a_round_trip_through_a_layout_is_exact(case: str, tmp_path: Path) -> None:
    """The weights are loaded once from a converted checkpoint, and once directly from the Hugging Face folder."""
    dtype = torch.bfloat16 if case in ("llama3", "qwen3-moe") else torch.float32
    theirs, start = save_model(case, tmp_path / "hf", dtype), tmp_path / "start"
    Conversion(theirs, start, None, Options()).run(1)
    saved = saved_config(Checkpoint(candidates(start).folders[0]))
    trained = {start: tmp_path / "trained", theirs: tmp_path / "trained-hf"}
    for load, new in trained.items():
        assert run_world(4, load_and_save, saved, load, new) == [(Progress(), 0)] * 4
    Conversion(tmp_path / "trained", tmp_path / "back", None, Options(family=CASES[case][0])).run(1)
    assert_same_weights(theirs, tmp_path / "back")
    checkpoints = [Checkpoint(candidates(new).folders[0]) for new in trained.values()]
    assert not differences(*checkpoints)


def bytes_read(rank: int, world_size: int, folder: Path) -> int:
    """Return the number of bytes that a rank under TP 2 and PP 2 reads from a Hugging Face folder."""
    total, read = 0, FileTensor._read

    def counted(self: FileTensor, file: BinaryIO, row: int, into: torch.Tensor) -> None:
        nonlocal total
        total += into.nbytes
        read(self, file, row, into)

    FileTensor._read = counted
    hf = HFFolder(folder)
    model = config_from_hf(hf.config)
    weights = HFWeights(hf.tensors, model, hf.config["model_type"])
    state = initialize_model_parallel(2, 2)
    layers = split_layers(model.num_layers, 2, 1.0, 1.0)[state.pp.rank]
    stage = GPTModel(model, ModelParallelConfig(fp32=True), state, Stage(layers, state.pp.first, state.pp.last))
    for parameter in stage.parameters():
        weights.read(parameter.meta.name, shard_of(parameter.meta, state.coords))
    return total


def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    """The only weights that both TP ranks read are norm weights and weights that are sharded along the input, because
    each row of a tensor is read as a whole."""
    folder = save_model("llama2", tmp_path / "hf")
    whole = weights_in(folder)
    twice = sum(value.nbytes for name, value in whole.items() if value.ndim == 1 or "o_proj" in name or "down" in name)
    counts = run_world(4, bytes_read, folder)
    assert sum(counts) == sum(value.nbytes for value in whole.values()) + twice
