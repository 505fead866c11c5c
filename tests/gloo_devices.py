"""One gloo device for all process groups of a process, where torch makes one for each group.

A device is a socket, and a thread that looks at it a hundred times a second. A rank of a test has some twenty groups,
and eight ranks share two cores: their devices take a quarter of the processor time of a small world.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


class SharedDeviceGloo(dist.ProcessGroupGloo):
    """gloo's process group on the device of this process."""

    _device: tuple[int, dist.ProcessGroupGloo.Device] | None = None
    """And the process that made it: a fork needs its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if SharedDeviceGloo._device is None or SharedDeviceGloo._device[0] != os.getpid():
            SharedDeviceGloo._device = os.getpid(), dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [SharedDeviceGloo._device[1]], timeout
        super().__init__(store, rank, size, options)


def share_gloo_devices() -> None:
    """All gloo groups that this process and its forks make from now on share a device."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
