"""Global gradient norm. The host does not wait for the device to compute the norm.

Each parameter element of the model counts once. Every data-parallel rank sums the squares of its shard, with or without
the distributed optimizer. If a parameter is replicated along a model-parallel axis, only one replica is counted.
Likewise, only one of the two copies of a tied embedding is counted. On the host, rows of `ROW` elements are summed in
the precision of the gradients (at least float32), and the row sums are summed in float64. If all elements of a flat
shard of 10^7 elements were summed in float32, the third digit of the sum would be wrong. If all elements were summed in
float64, the whole shard would have to be converted to float64, which takes 40 times as long on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.collectives import Pending, start_all_reduce_
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.host_to_device import threads_on_host
from megatron.core.parallel_state import ParallelState
from megatron.core.torch_private import foreach_norm

ROW = 4096


class GradNorm:
    """Gradient norm of the whole model. Each rank sums the squares of the gradients in its shards, and an all-reduce
    over the world adds up these sums.

    The all-reduce of the squares also sums the additional vectors `sums` [n] that the ranks pass to the method `own`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], state: ParallelState, device: torch.device, host_threads: int | None = None
    ) -> None:
        """Select the gradients that are included in the norm. If a parameter has replicas, only the first replica is
        included. `host_threads` is the number of threads that read gradients in host memory. The default is
        `torch.get_num_threads()`."""
        self.world, self.device = state.world, device
        self._threads = host_threads
        self.counted: list[Tensor] = []
        self.replicas: list[Tensor] = []
        for bucket in buckets:
            runs: list[tuple[bool, int, int]] = []
            for piece in bucket.layout.pieces(*bucket.shard_range):
                counts = piece.meta.is_first_replica(state.coords) and bucket.copies.first
                stop = piece.offset + piece.stop - piece.start
                if runs and runs[-1][0] == counts:
                    # The padding between the parameters is zero, so the padding may be included in the sum.
                    runs[-1] = (counts, runs[-1][1], stop)
                else:
                    runs.append((counts, piece.offset, stop))
            for counts, start, stop in runs:
                view = bucket.grad_shard[start - bucket.shard_range[0] : stop - bucket.shard_range[0]]
                (self.counted if counts else self.replicas).append(view)

    def own(self, sums: Tensor | None = None) -> Tensor:
        """Return this rank's contribution to the all-reduce, as a float64 vector. The vector contains the sum of
        squares that count in the norm, the sum of squares of replicas, and the elements of `sums`."""
        squares = torch.stack([self._sum_of_squares(self.counted), self._sum_of_squares(self.replicas)])
        return squares if sums is None else torch.cat([squares, sums.to(squares)])

    def start(self, own: Tensor) -> Pending:
        """Launch an all-reduce that replaces `own` with its sum over all ranks."""
        return start_all_reduce_(own, self.world)

    def finish(self, summed: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (norm, overflow, sums) as float64 tensors on the device. `summed` is the result of the all-reduce.

        `overflow` is 1 if a gradient (including the gradients of replicas) or an element of `sums` is infinite or NaN,
        else 0. If `factor` is given, `norm` is the norm of the gradients multiplied by `factor`.
        """
        norm = summed[0].sqrt() if factor is None else summed[0].sqrt() * factor
        return norm, (~torch.isfinite(summed).all()).to(torch.float64), summed[2:]

    def _sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        on_host = [tensor for tensor in tensors if not tensor.is_cuda]
        sums = []
        if on_gpu:
            sums.append(torch.stack(foreach_norm(on_gpu, 2, torch.float64)).square().sum())
        if on_host:
            with threads_on_host(self._threads if self.device.type == "cuda" else None):
                sums.append(torch.stack([sum_of_squares(tensor) for tensor in on_host]).sum().to(self.device))
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of a 1-D tensor as a float64 scalar.

    A float32 sum would overflow if an element exceeded about 10^18.
    """
    whole, dtype = x.numel() // ROW * ROW, torch.promote_types(x.dtype, torch.float32)
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()
