"""Checkpoints of real models and optimizers: loaded at any layout and saved there, they are the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.latest_checkpoint import candidates
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.pipeline_parallel.layout import split_layers
from megatron.training.checkpointing import Checkpointer
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.progress import Progress
from tests.gpt_cases import STYLES
from tests.harness import run_world
from tools.inspect_checkpoint import differences


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: bool = True

    def config(self, style: str, bf16: bool, **checkpoint: str) -> RunConfig:
        return RunConfig(
            model=replace(STYLES[style], num_layers=3),
            parallel=ModelParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                sequence_parallel=self.tp > 1,
                bf16=bf16,
            ),
            optimizer=OptimizerConfig(lr=1e-2, use_distributed_optimizer=self.zero),
            checkpoint=CheckpointConfig(**checkpoint),
        )


def build(config: RunConfig, state: ParallelState) -> tuple[dict[int, GPTModel], DistributedOptimizer]:
    stage, last = state.pp.rank, state.pp.size - 1
    layers = split_layers(config.model.num_layers, state.pp.size, 1.0, 1.0)[stage]
    model = GPTModel(config.model, config.parallel, state, layers=layers, first=stage == 0, last=stage == last)
    zero = config.optimizer.use_distributed_optimizer
    ddp = DistributedDataParallel(config.ddp, config.parallel, state, [model], zero)
    return {stage: model}, DistributedOptimizer(config.optimizer, ddp, state)


def train_and_save(rank: int, world_size: int, layout: Layout, style: str, bf16: bool, root: Path) -> None:
    config = layout.config(style, bf16, save=str(root))
    state = initialize_model_parallel(layout.tp, layout.pp)
    stages, optimizer = build(config, state)
    for param in stages[state.pp.rank].parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, param.meta.name)))
        whole = torch.randn(param.meta.global_shape, generator=generator)
        offset, shape = param.meta.box(state.coords)
        param.main_grad.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])
    optimizer.step(1e-2, 0.01)
    Checkpointer(config, state, stages, optimizer).save(Progress(4, 32, data_fingerprint="d"))


def load_and_save(rank: int, world_size: int, layout: Layout, style: str, bf16: bool, old: Path, new: Path) -> int:
    config = layout.config(style, bf16, load=str(old), save=str(new))
    state = initialize_model_parallel(layout.tp, layout.pp)
    stages, optimizer = build(config, state)
    checkpointer = Checkpointer(config, state, stages, optimizer)
    progress = checkpointer.load()
    assert progress == Progress(4, 32, data_fingerprint="d")
    checkpointer.save(progress)
    return optimizer.step_count


LAYOUTS = {"tp2-pp2": Layout(2, 2), "pp3": Layout(pp=3), "tp4": Layout(tp=4), "dp3": Layout(dp=3)}
LAYOUTS |= {"dp2-whole": Layout(dp=2, zero=False), "tp2-dp2": Layout(2, 1, 2), "one": Layout()}


@pytest.mark.parametrize(("style", "bf16"), [("gpt", True), ("llama", False), ("qwen2", True)])
def test_a_chain_of_layouts_keeps_every_bit(tmp_path: Path, style: str, bf16: bool) -> None:
    """Each layout loads what the one before it saved; the first trained."""
    first = Layout(2, 1, 2) if style == "llama" else Layout(2, 2, 1)
    run_world(4, train_and_save, first, style, bf16, tmp_path / "trained")
    before = "trained"
    for name, layout in LAYOUTS.items():
        world = layout.tp * layout.pp * layout.dp
        assert run_world(world, load_and_save, layout, style, bf16, tmp_path / before, tmp_path / name) == [1] * world
        before = name
    for name in LAYOUTS:
        found, expected = candidates(tmp_path / name).folders[0], candidates(tmp_path / "trained").folders[0]
        assert not differences(Checkpoint(found), Checkpoint(expected)), name
