"""Page-locked host memory, which a GPU can copy from and to by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return zeros in host memory, `pinned` if copies are to be asynchronous.

    The memory is locked in place. torch's own allocator of pinned memory would round up to the next power of two,
    nearly twice as much in the worst case, for tensors that a run keeps to its end."""
    zeros = torch.zeros(numel, dtype=dtype, device="cpu")
    if pinned and numel:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    return zeros
