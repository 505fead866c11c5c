"""Weight gradients, which are accumulated into `main_grad` during the backward pass or queued for the W passes of a
zero-bubble schedule.

The backward pass of a linear layer computes two gradients. The previous pipeline stage waits for the input gradient,
but no rank waits for the weight gradient. Zero-bubble schedules (Qi et al., arXiv 2401.10241) therefore compute the
weight gradient when a rank would otherwise be idle.

Every autograd Function with a weight passes its weight gradient to `accumulate_weight_grad`, which adds, queues or
returns the gradient. The pipeline executor owns the `WeightGradQueue`, which layers receive when they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from megatron.core.compiled_regions import region, torch_function
from megatron.core.dropout import mixed, round_to_bf16, uniform_of
from megatron.core.torch_private import AutogradContext, index_put_impl_

ROUNDED_AT_ONCE = 2**22
"""Number of elements of a bf16 sum that are rounded at a time, which limits the memory of temporary tensors."""

SALT = 0x2545F491
"""Salt that separates the random bits for gradients from other random bits."""

CONVERTED_AT_ONCE = 2**19
"""Number of elements of a bf16 product that are converted to fp32 at a time on CPU, chosen so that they fit in the CPU
cache."""


class WeightGradQueue:
    """Queue of weight-gradient jobs. Backward passes between `begin(key)` and `end()` add their jobs under `key`, and
    `run(key)` runs these jobs."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, list[Callable[[], None]]] = {}
        self._key: Hashable | None = None

    def begin(self, key: Hashable) -> None:
        """From now on, queue weight gradients under `key`, until `end` is called."""
        assert key is not None and self._key is None, f"{key} begins before {self._key} has ended"
        assert key not in self._jobs, f"the weight gradients of {key} have not been run"
        self._key = key
        self._jobs[key] = []

    def end(self) -> None:
        """Stop queueing. Later backward passes compute their weight gradients immediately."""
        assert self._key is not None, "end() without begin()"
        self._key = None

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Run the jobs queued under `key` in the order of the backward pass, and free their operands."""
        assert key != self._key, f"{key} has not ended"
        jobs = self._jobs.pop(key)
        jobs.reverse()
        while jobs:
            jobs.pop()()

    def assert_empty(self) -> None:
        """Check that no weight gradient is left at the end of a step."""
        assert self._key is None, f"{self._key} has not ended"
        assert not self._jobs, f"weight gradients were not computed: {list(self._jobs)}"

    def defers(self, weight: Tensor) -> bool:
        """Return True if the gradient of `weight` would be queued now. If the weight has no `main_grad`, the gradient
        is not queued, because autograd needs it immediately."""
        return self._key is not None and main_grad_of(weight) is not None

    def run_or_defer(self, job: Callable[[], None]) -> None:
        """Between `begin` and `end`, add the job to the queue. At any other time, run the job immediately."""
        if self._key is None:
            job()
        else:
            self._jobs[self._key].append(job)


def accumulate_weight_grad(
    weight: Tensor, add_: Callable[[Tensor, bool], object], queue: WeightGradQueue | None = None
) -> Tensor | None:
    """Add a weight gradient to `weight.main_grad`, immediately or through the queue. Return the gradient that the
    `backward` of an autograd Function must return.

    `add_(out, overwrite)` adds dW to `out`, a tensor of the weight's shape. If `overwrite` is True, `add_` instead
    overwrites `out` with dW. This is the case for the first contribution of a step that did not zero `main_grad`.
    `add_` is called only when the gradient is computed. A queued job therefore need not fetch its operands in advance;
    for example, it may gather a sequence-parallel input only when it runs.

    `weight.before_main_grad`, if set, is called before each contribution, because a `main_grad` may have no memory yet.
    If the weight is frozen, this function does nothing. The gradient of a weight without `main_grad` is returned to
    autograd. If `weight.on_main_grad` is set, it is called after each contribution to `main_grad`. `GradReadiness`
    counts these calls.
    """
    if not weight.requires_grad:
        return None
    main_grad = main_grad_of(weight)
    if main_grad is None:
        dw = torch.empty_like(weight)
        add_(dw, True)
        return dw

    round_into = getattr(weight, "main_grad_rounding", None)

    def accumulate() -> None:
        prepare = getattr(weight, "before_main_grad", None)
        if prepare is not None:
            prepare()
        stale = is_stale(weight)
        mark_stale(weight, False)
        if round_into is not None:
            added = torch.empty(main_grad.shape, dtype=torch.float32, device=main_grad.device)
            add_(added, True)
            round_into(main_grad.zero_() if stale else main_grad, added)
        else:
            add_(main_grad, stale)
        report = getattr(weight, "on_main_grad", None)
        if report is not None:
            report()

    if queue is None:
        accumulate()
    else:
        queue.run_or_defer(accumulate)
    return None


def mark_stale(weight: Tensor, stale: bool) -> None:
    """Record whether `weight.main_grad` is stale, that is, still contains the gradient of the previous step. A stale
    `main_grad` is overwritten by the first gradient of a step."""
    weight.main_grad_is_stale = stale  # type: ignore[attr-defined]


def is_stale(weight: Tensor) -> bool:
    return getattr(weight, "main_grad_is_stale", False)


def rounding_sum(compiled: bool) -> Callable[[Tensor, Tensor], None]:
    """Return a function that adds an fp32 tensor to a contiguous bf16 sum of the same shape. The function may overwrite
    the fp32 tensor.

    The sum is computed in fp32, then rounded up or down at random, so that the expected sum is exact. If the sum were
    rounded to nearest, small contributions of micro-batches would be lost: those smaller than half the distance between
    two bf16 numbers. The random bits are a hash of both addends, so a repeated step gives the same result.
    """
    return region(_add_rounded_, True, static=True) if compiled else _add_rounded_in_parts_


def _add_rounded_(total: Tensor, added: Tensor, into: Tensor | None = None) -> None:
    key = mixed(added.view(torch.int32)) ^ total.view(torch.int16).to(torch.int32)
    total.copy_(round_to_bf16(torch.add(added, total, out=into), uniform_of(key, SALT)))


def _add_rounded_in_parts_(total: Tensor, added: Tensor) -> None:
    for before, new in zip(total.view(-1).split(ROUNDED_AT_ONCE), added.view(-1).split(ROUNDED_AT_ONCE), strict=True):
        _add_rounded_(before, new, into=new)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the buffer that sums the gradients of `weight`; None if autograd sums them in `weight.grad`."""
    return getattr(weight, "main_grad", None)


def saved_without_graph(ctx: AutogradContext) -> tuple[Tensor, ...]:
    """Return the saved tensors of an autograd Function, detached. A queued weight-gradient job that used attached
    tensors would keep the autograd graph alive."""
    return tuple(x.detach() for x in ctx.saved_tensors)


@torch_function
def add_product_(out: Tensor, dy: Tensor, x: Tensor, overwrite: bool = False) -> None:
    """Add dyᵀ x to out [o, i], summed in the precision of `out`. The shapes are: dy [n, o], x [n, i]. If `overwrite` is
    True, out is overwritten with dyᵀ x.

    On CPU, a product of bf16 matrices is rounded once, to bf16, before it is added. The resulting relative error of
    each micro-batch's product is at most 2^-9. CPU kernels for bf16 have no fp32 result, but are several times as fast
    as fp32 kernels.
    """
    beta = 0 if overwrite else 1
    if out.dtype == dy.dtype:
        out.addmm_(dy.t(), x, beta=beta)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, dy.t(), x, out_dtype=torch.float32, beta=beta, out=out)
    elif dy.dtype == torch.bfloat16:
        rows = max(1, CONVERTED_AT_ONCE // out.shape[1])
        for part, product in zip(out.split(rows), dy.t().mm(x).split(rows), strict=True):
            part.copy_(product) if overwrite else part.add_(product)
    elif torch.promote_types(out.dtype, dy.dtype) == out.dtype:
        out.addmm_(dy.t().to(out.dtype), x.to(out.dtype), beta=beta)
    else:
        product = dy.t().mm(x)
        out.copy_(product) if overwrite else out.add_(product)


def add_rows_(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows[i] to out[index[i]] for each i, in the precision of `out` and in a fixed order.

    Indices must be in [0, len(out)). On GPUs, the indices are not checked. To check them, some versions of torch's
    `index_put_` copy the largest and the smallest index to the host, which waits for the GPU.
    """
    if out.is_cuda:  # index_put_ accumulates in a fixed order; index_add_ uses atomic operations, whose order varies
        index_put_impl_(out, [index], rows.to(out.dtype), accumulate=True, unsafe=True)
    else:
        out.index_add_(0, index, rows.to(out.dtype))
