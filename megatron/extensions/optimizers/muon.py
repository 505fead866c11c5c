"""Muon: momentum, orthogonalized as a whole matrix, as the update of each matrix of the hidden layers.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); Moonlight (arXiv 2502.16982) for its scale
and its use at size. All other parameters have an optimizer of their own, --muon-scalar-optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.optimizer.matrix_exchange import MatrixExchange
from megatron.core.optimizer.matrix_plan import Matrix, MatrixPlan, Part
from megatron.core.optimizer.optimizer import CHUNK, Optimizer, OptimizerShard, StepValues
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optimizers.flags import MuonFlags
from megatron.extensions.optimizers.newton_schulz import Coefficients, coefficients

EPS = 1e-15
"""Least norm that a matrix is divided by, as in Emerging-Optimizers from 0.4.0 on: gradients of any size give an update
of the same size."""


def build_exchange(config: OptimizerConfig, ddp: DistributedDataParallel, state: ParallelState) -> MatrixExchange:
    """The exchange of the matrices that Muon updates: the entry of MATRIX_EXCHANGES."""
    options, axis = config.options(MuonFlags), state.axis("stage")
    blockwise, distributed = options.muon_tp_mode == "blockwise", config.use_distributed_optimizer
    plan = MatrixPlan(ddp.layouts, state.dims, axis.ranks, distributed, splits_of(options), blockwise)
    return MatrixExchange(plan, axis, matrix_dtype(ddp.main_dtype, options.muon_fp32_matmul_prec), ddp.device)


def splits_of(options: MuonFlags) -> Callable[[str], bool]:
    """Whether weights that are fused under a name (`ParamMeta.fused`) are updated as matrices of their own."""
    return lambda fused: {"qkv": options.muon_split_qkv, "gate_up": options.muon_split_gate_up}.get(fused, True)


def matrix_dtype(main_dtype: torch.dtype, precision: str) -> torch.dtype:
    """The dtype in which matrices travel and are orthogonalized."""
    return torch.bfloat16 if main_dtype == torch.float32 and precision == "medium" else main_dtype


class Muon(Optimizer):
    """W <- (1 - lr * decay) W - lr * scale * orthogonalized(M), with the average M <- mu M + (1 - mu) G.

    With Nesterov's look-ahead it is mu M + (1 - mu) G, for the new M, that is orthogonalized.
    """

    def __init__(self, config: OptimizerConfig, shards: Sequence[OptimizerShard], exchange: MatrixExchange) -> None:
        super().__init__(config, shards)
        self.exchange = exchange
        self.options = config.options(MuonFlags)
        self._coefficients = coefficients(self.options.muon_coefficient_type, self.options.muon_num_ns_steps)

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

    @staticmethod
    def update_flops(config: OptimizerConfig, metas: Sequence[ParamMeta]) -> int:
        """Those of the Newton-Schulz iterations, once for each matrix, whatever the layout and the batch."""
        options = config.options(MuonFlags)
        layouts = plan_buffers([(meta, meta.global_shape) for meta in metas], 1, 1, whole_roles=config.whole_roles)
        plan = MatrixPlan(layouts, ParallelDims(), [0], True, splits_of(options))
        return 2 * options.muon_num_ns_steps * sum(matrix.cost for matrix in plan.matrices)

    @staticmethod
    def update_dtypes(config: OptimizerConfig, main_dtype: torch.dtype) -> Sequence[torch.dtype]:
        """That in which matrices travel and are orthogonalized."""
        return (matrix_dtype(main_dtype, config.options(MuonFlags).muon_fp32_matmul_prec),)

    def _orthogonalized(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return newton_schulz(x, self._coefficients)
        with _float32_matmul_precision(self.options.muon_fp32_matmul_prec):
            return newton_schulz(x, self._coefficients)


def _held(flat: Tensor, part: Part) -> Tensor:
    """The part's values in a shard."""
    return flat[part.start : part.stop].view(part.held)[part.within]


def newton_schulz(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """x [n, rows, columns] -> the same shape: brings the singular values of each matrix near 1 and keeps its singular
    vectors. Each step is a quintic polynomial, aX + (bA + cA^2) X with A = X X^T, after a division by the norm.
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
    """Factor of the update of a matrix [rows, columns], which maps `columns` features to `rows`.

    "spectral" (arXiv 2502.16982, section 2.2) makes the root mean square of the elements 1 whatever the shape,
    "unit_rms_norm" (Scion, arXiv 2502.07529) that of outputs, "shape_scaling" is K. Jordan's."""
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
