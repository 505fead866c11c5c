"""In CPU runs, freed memory blocks are kept and reused, unless environment variables configure malloc."""

from __future__ import annotations

import ctypes
import os
import resource

import pytest
import torch

from megatron.training.initialize import keep_memory
from tests.harness import run_world

NBYTES = 256 << 20
PAGES = NBYTES // os.sysconf("SC_PAGE_SIZE")
CPU = torch.device("cpu")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
GLIBC_DEFAULTS = {M_TRIM_THRESHOLD: 128 << 10, M_MMAP_MAX: 65536}


def faults(rank: int, world_size: int, device: torch.device, environ: dict[str, str]) -> int:
    """Allocate and free a block of 256 MiB four times, and return the number of page faults in the last round."""
    os.environ |= environ
    library = ctypes.CDLL(None)
    for parameter, default in GLIBC_DEFAULTS.items():  # resets parameters that the parent process may have changed
        library.mallopt(parameter, default)
    keep_memory(device)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = library.malloc(NBYTES)
        ctypes.memset(block, 1, NBYTES)
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_a_large_block_is_faulted_in_once() -> None:
    assert run_world(1, faults, CPU, {})[0] < PAGES / 100
    for device, environ in ((CPU, {"MALLOC_MMAP_THRESHOLD_": "1048576"}), (torch.device("cuda"), {})):
        assert run_world(1, faults, device, environ)[0] >= PAGES / 512  # at least one page fault per huge page
