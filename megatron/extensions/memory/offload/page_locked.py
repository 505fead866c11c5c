"""Page-locked host memory, which allows asynchronous copies from and to GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return zeros in host memory. If `pinned` is True, the memory is page-locked in place, so that copies can be
    asynchronous. PyTorch's pinned memory allocator is not used: it rounds sizes up to a power of two, which can nearly
    double the memory of long-lived tensors."""
    zeros = torch.zeros(numel, dtype=dtype, device="cpu")
    if pinned and numel:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    return zeros
