"""Construction of one rank's training run on the CPU, in a world started by `run_world`.

Components are normally imported on first use. Ranks are forked from the process that imports this module. Importing the
model components here, once for all ranks, is therefore faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.layers import LAYERS
from megatron.core.config.losses import LOSSES
from megatron.core.config.mixers import MIXERS
from megatron.core.config.norms import NORMALIZATIONS
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import local_runtime, set_determinism
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run

for _kind in (LAYERS, MIXERS, NORMALIZATIONS, ACTIVATIONS, LOSSES):
    for _name in _kind:
        _kind[_name]


@contextmanager
def local_run(config: RunConfig, rank: int, world_size: int) -> Iterator[TrainingRun]:
    """Context manager that builds the process groups, model, optimizer and data of this rank. At exit, the context
    manager closes the data.

    `config` must be resolved for `world_size`. Collective over the world.
    """
    set_determinism(config)
    run = build_run(config, local_runtime(config, rank, world_size))
    with closing(run.data):
        yield run
