"""Choose the attention kernel on GPUs (FlashAttention-2, FlashAttention-3 or cuDNN) by timing the kernels for the
model's tensor shapes.

If attention has dropout, the fused kernel with dropout (triton) is used wherever it is supported. The plain-torch
kernel stores the scores in memory and takes many times as long.

The fastest kernel depends on the GPU, the head size and the library version, so a fixed rule would be wrong in some
cases. All ranks use the same kernel: the kernel whose time on the slowest rank is the shortest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionOperands
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal, Dropout
from megatron.core.attention.tiles import Spans, rank_spans
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fusions.attention.fp8_attention import KERNEL_ERROR, Fp8Attention, error_beside_twin
from megatron.extensions.speed.fusions.kernel_choice import Choice, compare, device_clock
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import Runtime

BACKENDS = ("flash", "flash3", "cudnn")

WITH_DROPOUT = "triton"
"""Name of the only fused kernel that supports dropout."""

IN_FP8 = {"fp8": ("fp8_flash3", "fp8_triton"), "fp8_flash3": ("fp8_flash3",), "fp8_triton": ("fp8_triton",)}
"""Candidate kernels for each --attention-backend choice that runs the forward pass in fp8."""

COMPARED_LENGTH = 512
"""Number of tokens in the comparison of fp8 kernels with their plain-torch equivalent. The number is small, because the
plain-torch equivalent stores all scores in memory."""

OF_TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Mapping from kernel names to the backends of torch's `scaled_dot_product_attention`."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and dtype of one rank's causal attention during training, for which the kernels are compared."""

    length: int
    """Number of keys."""
    samples: int
    heads: int
    groups: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    queries: Spans | None = None
    """Positions of this rank's queries under context parallelism with --cp-comm-type p2p or all_gather. If None, the
    rank has the queries of all positions."""

    window: int | None = None
    """Number of keys that a query attends to in every layer; None if each query attends to all keys up to its own
    position."""

    tiles: bool = False
    """True if tile kernels compute the attention, as with context parallelism, documents or windows."""

    documents: bool = False
    """True if samples contain documents."""

    dropout: float = 0.0
    """Dropout probability of attention weights."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the names of the kernels to time. cuDNN is omitted if tiles have a window or consist of documents."""
        if self.dropout:
            return (WITH_DROPOUT,)
        varlen = self.tiles and (self.window is not None or self.documents)
        return tuple(name for name in BACKENDS if not (varlen and name == "cudnn"))


def choose_kernel(shape: AttentionShape, device: torch.device, world: Axis, fixed: str | None = None) -> Choice:
    """Time the attention kernels, and make torch use the fastest kernel. Collective over all ranks of the world.

    Raises ValueError if the `fixed` kernel does not run on some rank.

    Args:
        shape: Shape of a rank's attention.
        device: Device of the kernels.
        world: Axis of all ranks.
        fixed: Name of the only kernel to time. If "fp8", all fp8 and 16-bit kernels are timed. If None, all 16-bit
            kernels are timed.
    """
    names = shape.backends if fixed is None else (fixed,)
    if fixed in IN_FP8:
        names = IN_FP8[fixed] + (shape.backends if fixed == "fp8" else ())
    choice = compare({name: _lazily(shape, device, name) for name in names}, device_clock, device, world)
    if fixed in IN_FP8 and all(math.isinf(choice.seconds[name]) for name in IN_FP8[fixed]):
        raise ValueError(
            f"--attention-backend {fixed}: on at least one rank, no fp8 kernel runs ({choice.times}). fp8 kernels "
            "need a GPU of compute capability 8.9 or above; fp8_flash3 needs 9.0 and FlashAttention-3; use auto"
        )
    if fixed is not None and choice.winner is None:
        raise ValueError(
            f"--attention-backend {fixed}: on at least one rank, this kernel is not installed, or does not "
            f"support the GPU or the model's attention (head size {shape.head_dim}, {shape.dtype}); use auto"
        )
    if choice.winner is not None:
        use(choice.winner)
    return choice


def _lazily(shape: AttentionShape, device: torch.device, name: str) -> Callable[[], object]:
    """Return the function that is timed for the kernel `name`. The function allocates its operands when it is first
    called, so that `compare` holds the operands of only one kernel in memory at a time."""
    run = cache(lambda: attention_run(shape, device, name))
    return lambda: run()()


def attention_run(shape: AttentionShape, device: torch.device, backend: str) -> Callable[[], object]:
    """Return a function that runs the forward and backward pass of attention with the kernel `backend`."""
    generator = torch.Generator(device).manual_seed(0)

    def operand(rows: int, heads: int, width: int) -> Tensor:
        x = torch.empty(rows, shape.samples, heads, width, dtype=shape.dtype, device=device)
        return x.normal_(generator=generator).requires_grad_()

    rows = shape.length if shape.queries is None else sum(map(len, shape.queries))
    q = operand(rows, shape.heads, shape.head_dim)
    k, v = (operand(shape.length, shape.groups, width) for width in (shape.head_dim, shape.value_head_dim))
    grad = operand(rows, shape.heads, shape.value_head_dim).detach()
    scale = shape.head_dim**-0.5
    operands = AttentionOperands(scale, shape.dtype, device, shape.head_dim, shape.value_head_dim)
    kernels: AttentionBackend = ATTENTION_BACKENDS.build(backend, operands)
    fused = kernels.causal()
    plain, varlen = kernels.tiles()
    kernel = varlen if shape.documents or shape.window is not None else plain
    if shape.dropout:
        numbers = torch.arange(shape.samples, device=device)
        kernel = kernels.dropout(Dropout(shape.dropout, 0, 0, numbers))
    causal = Causal(kernel, None, shape.window)
    if isinstance(fused, Fp8Attention):
        parts = q[:COMPARED_LENGTH, :1], k[:COMPARED_LENGTH, :1], v[:COMPARED_LENGTH, :1]
        if not (error := error_beside_twin(fused.kernels, parts, scale)) <= KERNEL_ERROR:
            raise RuntimeError(f"differs by {error:.1e}, more than {KERNEL_ERROR:.1e}")

    def run() -> object:
        if shape.tiles or shape.dropout:
            out = local_attention(q, k, v, causal, shape.queries)
        else:
            with sdpa_kernel(OF_TORCH[backend]) if backend in OF_TORCH else nullcontext():
                out = fused(q, k, v)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def use(winner: str) -> None:
    """Make torch use the attention kernel `winner`, by disabling torch's other attention kernels. If `winner` is cuDNN,
    the memory-efficient kernel is disabled too, because torch would prefer it to cuDNN."""
    if winner in OF_TORCH:
        torch.backends.cuda.enable_cudnn_sdp(winner == "cudnn")
        torch.backends.cuda.enable_flash_sdp(winner == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(winner == "flash")


def attention_shape(config: RunConfig, cp_rank: int = 0) -> AttentionShape | None:
    """Return the shape of this rank's attention. Returns None if there are no kernels to compare, because no layer has
    attention, or because attention runs in plain torch or in 32 bits. Also returns None in a deterministic run without
    dropout, because the results of a deterministic run must not depend on timings."""
    model = config.model
    parallel = config.parallel
    dtype = getattr(torch, config.parallel.params_dtype)
    deterministic = config.training.deterministic and parallel.attention_backend == "auto"
    in_torch = model.alibi or model.attn_logit_softcapping is not None
    if in_torch or dtype.itemsize != 2 or (deterministic and not model.attention_dropout):
        return None
    length, cp = model.seq_length, parallel.context_parallel_size
    spans = [kind.span for kind in model.layers if kind.attends]
    if not spans:
        return None
    some_full = any(not span.hides(length) for span in spans)
    window = None if some_full else max(span.window or span.chunk or length for span in spans)
    documents = config.data.reset_attention_mask
    heads, rings = parallel.ranks_by_heads, parallel.ranks_by_queries
    parts = parallel.tensor_model_parallel_size * heads
    return AttentionShape(
        length,
        config.training.micro_batch_size,
        model.num_attention_heads // parts,
        model.query_groups // parts,
        model.head_dim,
        model.value_head_dim,
        dtype,
        queries=rank_spans(length, cp_rank // heads, rings) if rings > 1 else None,
        window=window,
        tiles=cp > 1 or documents or window is not None or model.attends_in_tiles,
        documents=documents,
        dropout=model.attention_dropout,
    )


def choose_attention(config: RunConfig, runtime: Runtime) -> str:
    """Choose one attention kernel for all ranks, and return its name for `ModelParallelConfig.attention_backend`.
    Collective over all ranks.

    If the requested kernel does not support this attention, another kernel is chosen, and a notice at the start of the
    run reports it. Raises ValueError if the requested kernel supports the attention but does not run on this machine.
    """
    asked = config.parallel.attention_backend
    if asked not in ("auto", "unfused", WITH_DROPOUT, *BACKENDS, *IN_FP8):
        return asked
    chooses = runtime.device.type == "cuda" and asked != "unfused"
    shape = attention_shape(config, runtime.state.cp.rank) if chooses else None
    if shape is None:
        return asked if asked in ("flash", "unfused", *IN_FP8) else "auto"
    asked = asked if asked in (*shape.backends, *IN_FP8) else "auto"
    choice = choose_kernel(shape, runtime.device, runtime.state.world, None if asked == "auto" else asked)
    kernel = f"attention kernel: {choice.winner or 'torch default'} (forward and backward of a layer: {choice.times})"
    runtime.say(f" {kernel}{'' if asked == 'auto' else ', as --attention-backend says'}")
    # If no kernel supports the shape, use torch's default kernel. Evaluation, which has no dropout, then also uses the
    # default.
    return choice.winner or "auto"
