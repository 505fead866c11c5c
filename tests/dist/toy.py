"""A made-up model for tests of gradients and optimizer: tagged parameters with known values, and no layers.

Every parameter has a global value and, for each step and data-parallel rank, a global gradient, both functions of
its name. A rank holds its box of the value and adds what its place in the layout gives it of the gradient, so what
one process must arrive at is known without running a model.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta


def catalogue(pp: int = 1) -> list[tuple[ParamMeta, int]]:
    """(tag, stage) of every parameter; a tied one stands on both of its stages. Sizes are odd on purpose."""
    tied = ParamMeta(
        "embedding.word_embeddings.weight", (24, 7), {"tp": 0}, shared_stages=(0, pp - 1) if pp > 1 else ()
    )
    last = pp - 1
    params = [
        (tied, 0),
        (ParamMeta("embedding.position_embeddings.weight", (5, 3), partial_over=("tp",)), 0),
        (ParamMeta("decoder.layers.0.input_layernorm.weight", (7,), partial_over=("tp",)), 0),
        (ParamMeta("decoder.layers.0.mlp.linear_fc1.weight", (2, 6, 7), {"tp": 1}), 0),
        (ParamMeta("decoder.layers.0.mlp.linear_fc1.bias", (6,), {"tp": 0}), 0),
        (ParamMeta("decoder.layers.0.mlp.linear_fc2.weight", (7, 18), {"tp": 1}), 0),
        (ParamMeta("decoder.layers.0.experts.linear_fc1.weight", (4, 6, 5), {"ep": 0, "expt_tp": 1}, expert=True), 0),
        (ParamMeta("decoder.layers.1.mlp.linear_fc2.weight", (31, 6), {"tp": 1}), last),
        (ParamMeta("decoder.layers.1.mlp.linear_fc2.bias", (31,), partial_over=("tp",)), last),
        (ParamMeta("decoder.final_layernorm.weight", (1,), partial_over=("tp",)), last),
    ]
    return params + ([(tied, last)] if pp > 1 else [])


def noise(shape: tuple[int, ...], *key: object) -> Tensor:
    """Standard normal values that depend on the key alone; float64."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_part(tensor: Tensor, meta: ParamMeta, state: ParallelState) -> Tensor:
    for start, size, dim in zip(*meta.box(state.coords), range(tensor.dim()), strict=True):
        tensor = tensor.narrow(dim, start, size)
    return tensor


class ToyStage(nn.Module):
    """One pipeline rank's parameters."""

    def __init__(self, state: ParallelState, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for i, (meta, stage) in enumerate(catalogue(state.dims.pp)):
            if stage == state.pp.rank:
                values = local_part(noise(meta.global_shape, meta.name), meta, state)
                param = nn.Parameter(values.to(dtype).contiguous())
                param.meta = meta
                self.register_parameter(f"p{i}", param)


def add_gradients(ddp: DistributedDataParallel, state: ParallelState, step: int) -> None:
    """Adds this rank's share of the step's gradient: partial sums split unevenly over tp, shared ones over stages."""
    for param in ddp.params:
        meta = param.meta
        axis = state.axis("expt_dp") if meta.expert else state.dp_cp
        for member in range(axis.size):
            if member == axis.rank:
                grad = noise(meta.global_shape, meta.name, step, member)
                if meta.partial_over and state.tp.size > 1:
                    grad = grad * (0.75 if state.tp.first else 0.25 / (state.tp.size - 1))
                if meta.shared_stages:
                    grad = grad * (0.375 if state.pp.first else 0.625)
                param.main_grad.add_(local_part(grad, meta, state))


class Oracle:
    """The same training in one process, with torch's own optimizer and clipping."""

    def __init__(self, state: ParallelState, make_optimizer, dtype: torch.dtype = torch.float64) -> None:
        self.state = state
        self.metas = metas = {meta.name: meta for meta, _ in catalogue(state.dims.pp)}
        self.params = {n: nn.Parameter(noise(m.global_shape, n).to(dtype)) for n, m in metas.items()}
        groups = [
            {"params": [p for n, p in self.params.items() if metas[n].decays is decays]} for decays in (True, False)
        ]
        self.optimizer = make_optimizer(groups)

    def step(self, step: int, tokens: float, clip: float, weight_decay: float) -> float:
        """One update; returns the norm before clipping."""
        for name, param in self.params.items():
            members = self.state.dims.expt_dp if self.metas[name].expert else self.state.dims.dp * self.state.dims.cp
            total = sum(noise(tuple(param.shape), name, step, member) for member in range(members))
            param.grad = (total / tokens).to(param.dtype)
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), clip if clip > 0 else float("inf"))
        self.optimizer.param_groups[0]["weight_decay"], self.optimizer.param_groups[1]["weight_decay"] = (
            weight_decay,
            0.0,
        )
        self.optimizer.step()
        return norm.item()

    def local(self, name: str) -> Tensor:
        return local_part(self.params[name].detach(), self.metas[name], self.state)
