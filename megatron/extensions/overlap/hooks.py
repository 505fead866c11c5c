"""The check of --tp-comm-overlap-method symmetric at the start of a run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.parallel_state import Axis
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


class SymmetricMemory(Callback):
    """Refuses a run whose tensor-parallel ranks have no symmetric memory."""

    def on_setup(self, runtime: Runtime) -> None:
        if not has_symmetric_memory(runtime.state.tp, runtime.device):
            raise ValueError(
                "--tp-comm-overlap-method symmetric needs GPUs of one node, under nccl, that reach each other's "
                f"memory, and those of the tensor-parallel ranks {', '.join(map(str, runtime.state.tp.ranks))} do not; "
                "use ring"
            )


def has_symmetric_memory(axis: Axis, device: torch.device) -> bool:
    """Whether the ranks of an axis are GPUs of one node that access each other's memory, under NCCL."""
    if device.type != "cuda" or axis.group is None or "nccl" not in dist.get_backend(axis.group):
        return False
    if axis.ranks[-1] - axis.ranks[0] >= torch.cuda.device_count():  # on several nodes
        return False
    others = (number for number in range(torch.cuda.device_count()) if number != device.index)
    return all(torch.cuda.can_device_access_peer(device, number) for number in others)
