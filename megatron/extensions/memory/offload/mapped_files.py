"""Storage of weights, gradients and optimizer states in memory-mapped files (--offload-weights-folder).

Host memory then acts as a cache for the disk: the operating system reads and writes pages as they are used. A file is
unlinked as soon as it is mapped. The disk space is therefore freed even if the run crashes. Space is reserved when a
file is created. Without the reservation, the operating system would kill a process without a message if the disk became
full later.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.collectives import gather_objects
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dist_checkpointing.state_dict import tagged_parameters
from megatron.core.distributed.param_layout import BufferLayout, place_states, plan_buffers
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.fused import states_of_shards
from megatron.core.parallel_state import Axis
from megatron.extensions.memory.offload.flags import HostWeightFlags
from megatron.training.config.batch_size import byte_text
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime

NAME = "--offload-weights-folder"


class MappedFiles:
    """Allocator of tensors that are stored in memory-mapped files in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        Path(folder).mkdir(parents=True, exist_ok=True)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros that is stored in a new memory-mapped file. Raises ValueError if the disk does not
        have enough space."""
        if not (nbytes := numel * dtype.itemsize):
            return torch.zeros(0, dtype=dtype)
        descriptor, name = tempfile.mkstemp(prefix=".weights-", dir=self.folder)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8).view(dtype)
        except OSError as error:
            rule = f"{byte_text(nbytes)} cannot be reserved ({error.strerror})"
            raise ValueError(f"{NAME} {self.folder}: {rule}; free space, or use a folder on a different disk") from None
        finally:
            os.close(descriptor)
            os.unlink(name)


class WeightsFolder(Callback):
    """Callback that checks the free disk space for offloaded weights. Before any space is reserved, the callback
    verifies that each disk has enough space for all ranks that use the disk."""

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        folder = config.options(HostWeightFlags).offload_weights_folder
        assert folder is not None
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = runtime.state
        params = [
            (meta, tuple(param.shape)) for meta, param in tagged_parameters(stages.values()) if param.requires_grad
        ]
        sizes = state.shard_axis("dp_cp").size, state.shard_axis("expt_dp").size
        optimizer = config.optimizer
        layouts = plan_buffers(params, *sizes, group_of=optimizer.group_of, unit_ranks=1)
        main = getattr(torch, config.parallel.main_dtype)
        needed = bytes_of_units(layouts, optimizer, getattr(torch, config.parallel.params_dtype), main)
        check_room(folder, needed, state.world)


def bytes_of_units(
    layouts: tuple[BufferLayout, ...], optimizer: OptimizerConfig, params: torch.dtype, main: torch.dtype
) -> int:
    """Return the number of bytes that a rank needs for offloaded weights, including their gradients and optimizer
    states. Only matrices are offloaded.

    Args:
        layouts: Layouts of the parameter buffers.
        optimizer: Optimizer configuration.
        params: Dtype of parameters.
        main: Dtype of main parameters and gradients.
    """
    names = str(params).removeprefix("torch."), str(main).removeprefix("torch.")
    gradient = getattr(torch, optimizer.gradients_dtype) if optimizer.gradients_dtype else main
    kind = optimizer.state_plan.main_kind(optimizer, *names, on_host=True)
    found = sum(layout.kept(True) * (params.itemsize + gradient.itemsize) for layout in layouts if layout.by_unit)
    for place in place_states(layouts, optimizer):
        if (layout := layouts[place.buffer]).by_unit:
            states = states_of_shards(optimizer, layout)
            found += optimizer.state_plan.main_bytes(place.numel, kind, main.itemsize)
            found += sum(state.nbytes(place.numel, main.itemsize) for state in states)
    return found


def check_room(folder: str, needed: int, world: Axis) -> None:
    """Raise ValueError, on every rank, if a disk has less free space than is needed by all ranks that use the disk.
    `needed` is the number of bytes that this rank needs."""
    disk = socket.gethostname(), os.stat(folder).st_dev
    asked: dict[tuple[str, int], list[int]] = {}
    for place, nbytes, free in gather_objects((disk, needed, shutil.disk_usage(folder).free), world):
        total = asked.setdefault(place, [0, free])
        asked[place] = [total[0] + nbytes, min(total[1], free)]
    for (host, _), (nbytes, free) in asked.items():
        if nbytes > free:
            rule = f"{byte_text(nbytes)} are needed for weights, gradients and states, but {host} has {byte_text(free)}"
            raise ValueError(f"{NAME} {folder}: {rule}; free space, or use a folder on a different disk")
