"""A single gloo device for all process groups of a process, instead of one device per group as in torch.

A device consists of a socket and a thread that polls the socket a hundred times a second. A rank in a test has about
twenty groups, and eight ranks share two cores. With one device per group, the polling threads would take a quarter of
the CPU time of small test runs.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


class SharedDeviceGloo(dist.ProcessGroupGloo):
    """gloo process group that uses the device shared by all groups of this process."""

    _device: tuple[int, dist.ProcessGroupGloo.Device] | None = None
    """Id of the process that created the device, and the device. A fork needs a new device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if SharedDeviceGloo._device is None or SharedDeviceGloo._device[0] != os.getpid():
            SharedDeviceGloo._device = os.getpid(), dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [SharedDeviceGloo._device[1]], timeout
        super().__init__(store, rank, size, options)


def share_gloo_devices() -> None:
    """Make all gloo groups that a process creates from now on share one device, in this process and in each of its
    forks."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
