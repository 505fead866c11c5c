"""One gloo device for all process groups of a process, where torch creates one per group.

A device is a socket and a thread that polls it a hundred times a second. A rank in a test has some twenty groups, and
eight ranks share two cores: their devices take a quarter of the processor time of a small world.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


class SharedDeviceGloo(dist.ProcessGroupGloo):
    """gloo process group that uses this process's device."""

    _device: tuple[int, dist.ProcessGroupGloo.Device] | None = None
    """The device and the id of the process that created it: a fork needs its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if SharedDeviceGloo._device is None or SharedDeviceGloo._device[0] != os.getpid():
            SharedDeviceGloo._device = os.getpid(), dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [SharedDeviceGloo._device[1]], timeout
        super().__init__(store, rank, size, options)


def share_gloo_devices() -> None:
    """Make all gloo groups that this process and its forks create from now on share a device."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
