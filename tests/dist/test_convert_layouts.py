"""Hugging Face folders are converted, trained layouts load and save them, and the way back gives the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import build_optimizer
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.pipeline_parallel.layout import split_layers
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.training.checkpointing import load_checkpoint, save_checkpoint, saved_config
from megatron.core.dist_checkpointing.storage import Checkpoint, find_checkpoint
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.conversion.convert import Conversion
from megatron.training.conversion.formats import Options
from megatron.training.progress import Progress
from tests.harness import run_world
from tests.hf_models import CASES, assert_same_weights, save_model

pytest.importorskip("transformers")


def load_and_save(rank: int, world_size: int, old: Path, new: Path) -> tuple[Progress, int]:
    """Starts a run from a converted checkpoint at TP 2, PP 2 and, with experts, EP 2, and saves it."""
    saved = saved_config(Checkpoint(find_checkpoint(old)))
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
        checkpoint=CheckpointConfig(load=str(old), save=str(new)),
    )
    state = initialize_model_parallel(2, 2, 1, experts, 2 // experts)
    stage, model = state.pp.rank, config.model
    layers = split_layers(model.num_layers, 2, 1.0, 1.0)[stage]
    tied = tied_stages(model, pipeline_layout(model, parallel))
    part = GPTModel(model, parallel, state, layers=layers, first=stage == 0, last=stage == 1, tied_stages=tied)
    ddp = DistributedDataParallel(config.ddp, parallel, state, [part], True)
    optimizer = build_optimizer(config.optimizer, ddp, state)
    progress = load_checkpoint(config, state, {stage: part}, optimizer)
    save_checkpoint(config, state, {stage: part}, optimizer, replace(progress, iteration=1))
    return progress, optimizer.step_count


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_through_a_layout(case: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if case in ("llama3", "qwen3-moe") else "float32"
    theirs = save_model(case, tmp_path / "hf", getattr(torch, dtype))
    Conversion(theirs, tmp_path / "start", None, Options()).run(1)
    results = run_world(4, load_and_save, tmp_path / "start", tmp_path / "trained")
    assert results == [(Progress(), 0)] * 4
    Conversion(tmp_path / "trained", tmp_path / "back", None, Options(model_type=CASES[case][0])).run(1)
    assert_same_weights(theirs, tmp_path / "back")
