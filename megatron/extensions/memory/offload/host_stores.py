"""Implementation of `HostMemory`, registered in HOST_MEMORY: the update of optimizer states in host memory, and the
store for offloaded activations."""

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
        """Return the object that updates the optimizer states that --optimizer-cpu-offload keeps in host memory.

        Args:
            config: Optimizer configuration.
            shards: Shards whose states are in host memory.
            chains: Optimizer update of each shard, in the order of `shards`.
            threads: Number of CPU threads for the update. None uses torch's default.
        """
        return HostUpdate(config, shards, chains, threads)

    @staticmethod
    def activations(config: ModelParallelConfig, device: torch.device | str) -> ActivationOffload:
        """Return the store that offloads activations of one rank's pipeline stages (--cpu-offloading)."""
        options = config.options(ActivationFlags)
        return ActivationOffload(options.cpu_offloading_num_layers, options.min_offloaded_tensor_size, device)
