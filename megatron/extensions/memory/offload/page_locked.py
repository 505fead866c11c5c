"""Host memory that a GPU copies from and to by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros in host memory, `pinned` for copies that nobody waits for.

    The memory is locked where it lies. torch's own allocator of pinned memory would take the next power of two, nearly
    twice as much in the worst case, for tensors that a run keeps to its end."""
    zeros = torch.zeros(numel, dtype=dtype, device="cpu")
    if pinned and numel:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    return zeros
