"""Muon optimizer: each hidden-layer matrix is updated with its orthogonalized momentum, which is computed for the whole
matrix.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), describes the optimizer. Moonlight (arXiv
2502.16982) describes the update scale and the training of large models with Muon. All other parameters are updated by
the optimizer that --muon-scalar-optimizer selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.fused import plain_shards
from megatron.core.optimizer.matrix_exchange import MatrixExchange
from megatron.core.optimizer.matrix_plan import Matrix, MatrixPlan, Part, linear_maps
from megatron.core.optimizer.optimizer import (
    CHUNK,
    OptimizerShard,
    Shard,
    ShardUpdate,
    StepValues,
    scale_gradients_,
)
from megatron.core.optimizer.transforms import FusedTransform, StageOfUpdate, State, Transform, elements
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.flags import MuonFlags, product_dtypes
from megatron.extensions.optim.optimizers.newton_schulz import Coefficients, coefficients

EPS = 1e-15
"""Lower bound of the norm by which a matrix is divided before the first iteration, as in Emerging-Optimizers since
0.4.0. The bound is so small that the size of an update does not depend on the size of the gradients.
"""


def splits_of(options: MuonFlags) -> Callable[[str], bool]:
    """Return a predicate that decides whether the parts of a fused weight are updated as separate matrices. The
    argument of the predicate is the name of the fused weight (`ParamMeta.fused`), such as "qkv"."""
    return lambda fused: {"qkv": options.muon_split_qkv, "gate_up": options.muon_split_gate_up}.get(fused, True)


def muon(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """Return the transforms of --optimizer muon for a matrix of a hidden layer."""
    return [Muon(config)]


class Muon(FusedTransform):
    """Muon: W <- (1 - lr * decay) W - lr * scale * orthogonalized(M), with the moving average M <- mu M + (1 - mu) G.
    With Nesterov's look-ahead, the updated M is replaced with mu M + (1 - mu) G before orthogonalization. One fused
    operation updates all matrices, because they are communicated together, and because matrices of equal size are
    multiplied in one batch.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.options = config.options(MuonFlags)

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("momentum_buffer", meta)]

    def kernel(self, shards: Sequence[Shard], stage: StageOfUpdate) -> ShardUpdate:
        options = self.options
        blockwise, distributed = options.muon_tp_mode == "blockwise", self.config.use_distributed_optimizer
        ranks = stage.axis.ranks
        plan = MatrixPlan(stage.layouts, stage.dims, ranks, distributed, splits_of(options), blockwise)
        main_dtype = str(stage.main_dtype).removeprefix("torch.")
        (dtype,) = product_dtypes(self.config, main_dtype)
        exchange = MatrixExchange(plan, stage.axis, getattr(torch, dtype), stage.device)
        return MuonKernel(options, plain_shards(shards), exchange)

    def flops(self, meta: ParamMeta) -> int:
        """Return the FLOPs of the Newton-Schulz iterations for a parameter. Each matrix is counted once, regardless of
        the parallel layout and the batch size."""
        boxes = linear_maps(meta, meta.fused is not None and splits_of(self.options)(meta.fused.name))
        return 2 * self.options.muon_num_ns_steps * sum(Matrix(meta, *box).cost for box in boxes)


class MuonKernel(ShardUpdate):
    """Muon update of all matrices of a pipeline stage. The elements of the matrices are stored in flat optimizer
    shards."""

    def __init__(self, options: MuonFlags, shards: Sequence[OptimizerShard], exchange: MatrixExchange) -> None:
        self.options = options
        self.shards = shards
        self.exchange = exchange
        self._coefficients = coefficients(options.muon_coefficient_type, options.muon_num_ns_steps)

    def scale_gradients(self, factor: Tensor) -> None:
        scale_gradients_(self.shards, factor)

    def step(self, values: StepValues) -> None:
        config = self.options
        rates = values.rates
        skip = values.skip
        skipped = values.skip > 0
        for shard in self.shards:
            assert shard.main.grad is not None
            tensors = (shard.main.grad, shard.states["momentum_buffer"])
            for grad, momentum in zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True):
                average = momentum.lerp(grad, 1 - config.muon_momentum)
                torch.where(skipped, momentum, average, out=momentum)
            own_lr, decay = rates.of(shard.group)
            shard.main.mul_(1 - own_lr * decay * (1 - skip))

        def read(part: Part, values: Tensor) -> None:
            shard = self.shards[part.shard]
            momentum = _held(shard.states["momentum_buffer"], part)
            if config.muon_nesterov:
                assert shard.main.grad is not None
                momentum = _held(shard.main.grad, part).lerp(momentum, config.muon_momentum)
            values.copy_(momentum)

        def write(part: Part, matrix: Matrix, values: Tensor) -> None:
            factor = scale(*matrix.size, config.muon_scale_mode) * config.muon_extra_scale_factor
            shard = self.shards[part.shard]
            own_lr, _ = rates.of(shard.group)
            _held(shard.main, part).add_(values.masked_fill_(skipped, 0), alpha=-own_lr * factor)

        self.exchange.transform(read, lambda x, numbers: self._orthogonalized(x), write)

    def _orthogonalized(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return newton_schulz(x, self._coefficients)
        with _float32_matmul_precision(self.options.muon_fp32_matmul_prec):
            return newton_schulz(x, self._coefficients)


def _held(flat: Tensor, part: Part) -> Tensor:
    """Return a view of the elements of `flat` (a flat tensor of an optimizer shard) that belong to `part` (a
    rectangular part of a matrix)."""
    return flat[part.start : part.stop].view(part.held)[part.within]


def newton_schulz(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Return matrices [n, rows, columns] with the singular vectors of the matrices x [n, rows, columns], and with
    singular values close to 1.

    Each matrix X is first divided by its norm. Each iteration then replaces X with the quintic polynomial aX + (bA +
    cA^2) X, where A = X X^T.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for a, b, c in steps:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).contiguous()


def scale(rows: int, columns: int, mode: str) -> float:
    """Return the update scale for a matrix [rows, columns] that maps `columns` features to `rows` features. `mode` is
    the value of --muon-scale-mode.

    "spectral" (arXiv 2502.16982, section 2.2) scales the update so that its elements have a root mean square of 1, for
    any shape of the matrix. "unit_rms_norm" (Scion, arXiv 2502.07529) scales the update so that inputs with a root mean
    square of 1 result in outputs with a root mean square of 1. "shape_scaling" is K. Jordan's rule.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    ratio = rows / columns
    return (ratio if mode == "unit_rms_norm" else max(1.0, ratio)) ** 0.5


@contextmanager
def _float32_matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
