"""The entry of HOST_MEMORY: the update of states in host memory, and the store of activations there."""

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
    """See `megatron.core.config.parallel.HostMemory`."""

    @staticmethod
    def update(
        config: OptimizerConfig, shards: Sequence[Shard], chains: Sequence[ShardUpdate], threads: int | None
    ) -> HostUpdate:
        """What --optimizer-cpu-offload asks for."""
        return HostUpdate(config, shards, chains, threads)

    @staticmethod
    def activations(config: ModelParallelConfig, device: torch.device | str) -> ActivationOffload:
        """What --cpu-offloading asks for, for the stages of a rank."""
        options = config.options(ActivationFlags)
        return ActivationOffload(options.cpu_offloading_num_layers, options.min_offloaded_tensor_size, device)
