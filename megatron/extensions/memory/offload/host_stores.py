"""Entry of the registry HOST_MEMORY that provides the update of states in host memory, and the store of offloaded
activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.optimizer.optimizer import Shard, ShardUpdate
from megatron.extensions.memory.offload.flags import ActivationFlags
from megatron.extensions.memory.offload.host_update import HostUpdate
from megatron.extensions.memory.offload.saved_activations import ActivationOffload


class HostStores:
    """Implementation of `megatron.core.config.parallel.HostMemory`."""

    @staticmethod
    def update(
        config: OptimizerConfig, shards: Sequence[Shard], chains: Sequence[ShardUpdate], threads: int | None
    ) -> HostUpdate:
        """Return the object that performs the optimizer update of --optimizer-cpu-offload.

        Args:
            config: Optimizer configuration.
            shards: Shards whose states are in host memory.
            chains: Update of each shard.
            threads: Number of threads of the update; None for torch's default.
        """
        return HostUpdate(config, shards, chains, threads)

    @staticmethod
    def activations(config: ModelParallelConfig, device: torch.device | str) -> ActivationOffload:
        """Return the store of --cpu-offloading for the stages of one rank."""
        options = config.options(ActivationFlags)
        return ActivationOffload(options.cpu_offloading_num_layers, options.min_offloaded_tensor_size, device)
