"""Page-locked host memory, which allows asynchronous copies from and to GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def host_zeros(numel: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return zeros in host memory; if `pinned`, copies can be asynchronous.

    The memory is page-locked in place. torch's allocator of pinned memory rounds sizes up to a power of two, which can
    nearly double the memory of tensors that exist for the whole run."""
    zeros = torch.zeros(numel, dtype=dtype, device="cpu")
    if pinned and numel:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    return zeros
