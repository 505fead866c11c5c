"""Toy model for tests of gradients and optimizers. The model has no layers, only parameters with metadata and known
values.

The value of each parameter is a function of the parameter's name. Its gradient is a function of the name, the step and
the data-parallel rank. Each rank holds its shard of the value and adds its contribution to the gradient, so the result
in one process is known without running a model.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import global_token_count, reduce_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import Fused, ParamMeta
from megatron.extensions import load
from megatron.training.config.flags import config_of_sections

LR, DECAY = 0.01, 0.1


def catalogue(pp: int = 1) -> list[tuple[ParamMeta, int]]:
    """Return one tuple (ParamMeta, pipeline stage) per parameter. A tied parameter occurs twice, once for each of its
    stages. The sizes are deliberately irregular."""
    shared = (0, pp - 1) if pp > 1 else ()
    tied = ParamMeta("embedding.word_embeddings.weight", (24, 7), {"tp": 0}, shared_stages=shared, role="embedding")
    last, cut, qkv = pp - 1, {"ep": 0, "expt_tp": 1}, Fused("qkv", 1, (3, 1, 1))
    params = [
        (tied, 0),
        (ParamMeta("embedding.position_embeddings.weight", (5, 3), partial_over=("tp",), role="embedding"), 0),
        (ParamMeta("decoder.layers.0.input_layernorm.weight", (7,), partial_over=("tp",), role="norm"), 0),
        (
            ParamMeta(
                "decoder.layers.0.mlp.linear_fc1.weight",
                (2, 6, 7),
                {"tp": 1},
                role="hidden",
                fused=Fused("gate_up", 0, (1, 1)),
            ),
            0,
        ),
        (ParamMeta("decoder.layers.0.mlp.linear_fc1.bias", (6,), {"tp": 0}, role="bias"), 0),
        (ParamMeta("decoder.layers.0.mlp.linear_fc2.weight", (7, 18), {"tp": 1}, role="hidden"), 0),
        (
            ParamMeta(
                "decoder.layers.0.self_attention.linear_qkv.weight", (2, 5, 2, 7), {"tp": 0}, role="hidden", fused=qkv
            ),
            0,
        ),
        (
            ParamMeta(
                "decoder.layers.0.experts.linear_fc1.weight", (4, 6, 5), cut, role="hidden", expert=True, stacked=1
            ),
            0,
        ),
        (ParamMeta("decoder.layers.1.mlp.router.weight", (4, 7), partial_over=("tp",), role="router"), last),
        (ParamMeta("decoder.layers.1.mlp.linear_fc2.weight", (31, 6), {"tp": 1}, role="hidden"), last),
        (ParamMeta("decoder.layers.1.mlp.linear_fc2.bias", (31,), partial_over=("tp",), role="bias"), last),
        (ParamMeta("decoder.final_layernorm.weight", (1,), partial_over=("tp",), role="norm"), last),
    ]
    return params + ([(tied, last)] if pp > 1 else [])


def noise(shape: tuple[int, ...], *key: object) -> Tensor:
    """Return normally distributed float64 values that depend only on `key`."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_part(tensor: Tensor, meta: ParamMeta, state: ParallelState) -> Tensor:
    for start, size, dim in zip(*meta.box(state.coords), range(tensor.dim()), strict=True):
        tensor = tensor.narrow(dim, start, size)
    return tensor


class ToyStage(nn.Module):
    """Module that holds the parameters of one pipeline rank."""

    def __init__(self, state: ParallelState, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for i, (meta, stage) in enumerate(catalogue(state.dims.pp)):
            if stage == state.pp.rank:
                values = local_part(noise(meta.global_shape, meta.name), meta, state)
                param = nn.Parameter(values.to(dtype).contiguous())
                param.meta = meta
                self.register_parameter(f"p{i}", param)


def add_gradients(ddp: DistributedDataParallel, state: ParallelState, step: int) -> None:
    """Add this rank's contribution to the gradients of a step. If a gradient is a sum over tensor-parallel ranks, or
    over the stages of a tied parameter, the terms of the sum have different sizes."""
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
    """Reference training in one process, with torch's optimizer and gradient clipping."""

    def __init__(self, state: ParallelState, make_optimizer, dtype: torch.dtype = torch.float64) -> None:
        self.state = state
        self.metas = metas = {meta.name: meta for meta, _ in catalogue(state.dims.pp)}
        self.params = {n: nn.Parameter(noise(m.global_shape, n).to(dtype)) for n, m in metas.items()}
        groups = [
            {"params": [p for n, p in self.params.items() if metas[n].matrix is decays]} for decays in (True, False)
        ]
        self.optimizer = make_optimizer(groups)

    def step(self, step: int, tokens: float, clip: float, weight_decay: float) -> float:
        """Take one step of the reference optimizer and return the gradient norm before clipping."""
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


def optimizer_config(**flags) -> OptimizerConfig:
    """Return an optimizer configuration with the given fields. Fields of extensions are also allowed."""
    return config_of_sections({"optimizer": flags}).optimizer


load()
KINDS = [name for name in ("adam", "sgd", "muon") if name in OPTIMIZERS]
"""Names of the optimizers to test. muon is included if its extension is installed."""


def build(state, distributed=True, dtype="fp64", bucket_size=100, compiled=False, **flags):
    parallel = ModelParallelConfig(**{dtype: True}, compile=compiled)
    stage = ToyStage(state, getattr(torch, parallel.params_dtype))
    config = optimizer_config(use_distributed_optimizer=distributed, **flags)
    ddp = DistributedDataParallel(DDPConfig(bucket_size), parallel, state, [stage], config)
    return ddp, DistributedOptimizer(config, ddp, state)


def finalize_model_grads(ddp, total_tokens, state, seed=1.0):
    """Reduce the gradients over all ranks, and scale this rank's part of every `main_grad`. Afterwards, `main_grad`
    contains the gradient of the mean loss per valid token."""
    ddp.scale_grads_(reduce_model_grads(ddp, total_tokens, state, seed))


def run_step(ddp, optimizer, state, step, tokens=10, seed=1.0):
    """Run one step as the training loop does. Data-parallel rank r has `tokens` + r valid tokens."""
    ddp.zero_grad_buffer()
    add_gradients(ddp, state, step)
    if seed != 1.0:
        for buffer in ddp.buffers:
            buffer.grad_data.mul_(seed)
    total = global_token_count(torch.tensor(tokens + state.dp_cp.rank), state)
    factor = reduce_model_grads(ddp, total, state, seed)
    return optimizer.step(Update(Rates(LR, DECAY), factor)), total.item()
