"""Compute a single sum over all ranks. The command `torchrun ... tests/gpu/first_sum.py nccl` runs the shortest program
that shows whether NCCL works."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

backend = sys.argv[1]
dist.init_process_group(backend)
x = torch.ones(4, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(x)
print(f"rank {dist.get_rank()}: a sum of ones over {dist.get_world_size()} ranks: {x.tolist()}", flush=True)
assert x.tolist() == [dist.get_world_size()] * 4
dist.destroy_process_group()
