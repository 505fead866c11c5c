"""Parallel training of a Llama in plain PyTorch, as shown in PyTorch's documentation."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tools.bench.styles import Style


class Layer(nn.Module):
    def __init__(self, shape: Style) -> None:
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.head_dim = shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(h, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, h, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(shape.seq)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h] -> [b, s, h]"""
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class Llama(nn.Module):
    """Llama model or pipeline stage: tokens [b, s] -> logits [b, s, V]. `embedding`, `norm` and `head` are None in
    stages that do not contain them."""

    def __init__(self, shape: Style) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.hidden)
        self.head: nn.Linear | None = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is None or self.norm is None:
            return x
        return self.head(self.norm(x))

    def stage(self, number: int, count: int) -> Llama:
        """Return pipeline stage `number` of `count` stages with equally many layers. The returned stage shares its
        parameters with this model."""
        part = Llama.__new__(Llama)
        nn.Module.__init__(part)
        each = len(self.layers) // count
        part.layers = self.layers[number * each : (number + 1) * each]
        part.embedding = self.embedding if number == 0 else None
        part.norm, part.head = (self.norm, self.head) if number == count - 1 else (None, None)
        return part


Batches = cycle
"""Endless iterator over global batches [micro-batches, s + 1]."""

Step = Callable[[], None]


def started(kind: str, shape: Style, micro_batches: int) -> Step:
    """Build a model on this rank, and return a function that runs one training step. `kind` is a key of `KINDS`;
    environment variables define the ranks."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Llama(shape)
    batches = torch.randint(shape.vocab, (8, micro_batches, shape.seq + 1))
    return KINDS[kind](model, cycle(batches))


def loss_of(micro_batches: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over a micro-batch's tokens, divided by the number of micro-batches."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten()) / micro_batches


def updated(model: nn.Module, backward: Step) -> Step:
    """Return a training step that runs `backward` for all micro-batches, clips the gradients and applies AdamW."""
    kinds: dict[bool, list[Tensor]] = {}  # multi-tensor operations cannot mix tensors and DTensors
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    groups = list(kinds.values())
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.1, fused=True)

    def norm_of(group: list[Tensor]) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step() -> None:
        backward()
        norm = torch.stack([norm_of(group) for group in groups]).norm()
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def over_samples(model: nn.Module, batches: Batches, begin: Callable[[bool], None], rank: int, size: int) -> Step:
    """Return a function that runs one training step. In this step, this rank processes every `size`-th sample of the
    batch, starting with sample `rank`. Each sample is a micro-batch. The step calls `begin` before each micro-batch,
    with True for the last micro-batch and False for the others."""

    def backward() -> None:
        batch = next(batches)
        own = batch[rank::size]
        for number, sample in enumerate(own):
            begin(number == len(own) - 1)
            loss_of(len(batch), model(sample[None, :-1]), sample[None, 1:]).mul(size).backward()

    return updated(model, backward)


def data_parallel(model: Llama, batches: Batches) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    syncs = partial(setattr, wrapped, "require_backward_grad_sync")
    return over_samples(wrapped, batches, syncs, dist.get_rank(), dist.get_world_size())


def fully_sharded(keeps_params: bool, reduces_each: bool, model: Llama, batches: Batches) -> Step:
    """Return a training step with FSDP2 on every layer.

    Args:
        keeps_params: keep parameters unsharded between the micro-batches of a step; otherwise reshard them after each
        pass (ZeRO-3).
        reduces_each: reduce gradients in each micro-batch; otherwise keep them unsharded and reduce them in the last
            micro-batch.
        model: the model to shard.
        batches: global batches.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=not keeps_params)

    def begin(last: bool) -> None:
        model.set_requires_gradient_sync(last or reduces_each)  # type: ignore[operator]
        model.set_reshard_after_backward(last or not keeps_params)  # type: ignore[operator]

    return over_samples(model, batches, begin, dist.get_rank(), dist.get_world_size())


def tensor_parallel(model: Llama, batches: Batches) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        columns = {f"{part}": ColwiseParallel() for part in ("wq", "wk", "wv", "gate", "up")}
        parallelize_module(layer, mesh, {**columns, "wo": RowwiseParallel(), "down": RowwiseParallel()})
        layer.heads //= dist.get_world_size()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    return over_samples(model, batches, lambda last: None, 0, 1)


def pipelined(schedule: str, chunks: int, model: Llama, batches: Batches) -> Step:
    """Return a training step of torch.distributed.pipelining with `chunks` stages per rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count, micro_batches = size * chunks, len(next(batches))
    vee = schedule == "ScheduleZBVZeroBubble"
    own = [rank, count - 1 - rank] if vee else list(range(rank, count, size))
    parts = [model.stage(number, count) for number in own]
    stages = [pipelining.PipelineStage(part, number, count, "cpu") for part, number in zip(parts, own, strict=True)]
    loss, kind = partial(loss_of, micro_batches), getattr(schedules, schedule)
    runs = kind(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=loss, scale_grads=False)

    def backward() -> None:
        batch = next(batches)
        args = (batch[:, :-1].contiguous(),) if 0 in own else ()
        target = {"target": batch[:, 1:].contiguous()} if count - 1 in own else {}
        runs.step(*args, **target)

    return updated(nn.ModuleList(parts), backward)


KINDS: dict[str, Callable[[Llama, Batches], Step]] = {
    "torch DDP": data_parallel,
    "torch FSDP2": partial(fully_sharded, True, False),
    "torch FSDP2 ZeRO-2": partial(fully_sharded, True, True),
    "torch FSDP2 ZeRO-3": partial(fully_sharded, False, True),
    "torch DTensor TP": tensor_parallel,
    "torch PP 1F1B": partial(pipelined, "Schedule1F1B", 1),
    "torch PP Interleaved1F1B": partial(pipelined, "ScheduleInterleaved1F1B", 2),
    "torch PP ZBV": partial(pipelined, "ScheduleZBVZeroBubble", 2),
}
