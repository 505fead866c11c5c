"""Accumulation of weight gradients into `main_grad`. The gradients are computed either during the backward pass or, in
zero-bubble schedules, later in W passes.

The backward pass of a linear layer computes two gradients. The previous pipeline stage waits for the input gradient,
but no rank waits for the weight gradient. Zero-bubble schedules (Qi et al., arXiv 2401.10241) therefore postpone the
weight gradient to a time when the rank would otherwise be idle.

Every autograd function that has a weight calls `accumulate_weight_grad`, which adds the weight gradient to `main_grad`,
queues its computation, or returns it to autograd. The layers and the pipeline executor share a `WeightGradQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from megatron.core.compiled_regions import region, torch_function
from megatron.core.dropout import mixed, round_to_bf16, uniform_of
from megatron.core.torch_private import AutogradContext, index_put_impl_

ROUNDED_AT_ONCE = 2**22
"""Number of elements of a bf16 sum that are rounded at a time. The limit bounds the memory of temporary tensors."""

SALT = 0x2545F491
"""Salt of the hash that generates the random bits for rounding gradients. The salt makes these bits differ from other
random bits."""

CONVERTED_AT_ONCE = 2**19
"""Number of elements of a bf16 product that are converted to fp32 at a time on CPU. The converted elements fit in the
CPU cache."""


class WeightGradQueue:
    """Queue of weight-gradient jobs, that is, functions that compute weight gradients. Backward passes between
    `begin(key)` and `end()` queue their jobs under `key`, and `run(key)` runs these jobs."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, list[Callable[[], None]]] = {}
        self._key: Hashable | None = None

    def begin(self, key: Hashable) -> None:
        """Start queueing weight-gradient jobs under `key`, until `end` is called."""
        assert key is not None and self._key is None, f"{key} begins before {self._key} has ended"
        assert key not in self._jobs, f"the weight gradients of {key} have not been run"
        self._key = key
        self._jobs[key] = []

    def end(self) -> None:
        """Stop queueing. Subsequent backward passes compute their weight gradients immediately."""
        assert self._key is not None, "end() without begin()"
        self._key = None

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Run the jobs that were queued under `key`, in the order in which they were queued, and free their
        operands."""
        assert key != self._key, f"{key} has not ended"
        jobs = self._jobs.pop(key)
        jobs.reverse()
        while jobs:
            jobs.pop()()

    def assert_empty(self) -> None:
        """Assert that no jobs are left in the queue at the end of a step."""
        assert self._key is None, f"{self._key} has not ended"
        assert not self._jobs, f"weight gradients were not computed: {list(self._jobs)}"

    def defers(self, weight: Tensor) -> bool:
        """Return True if the computation of the gradient of `weight` would currently be queued. If the weight has no
        `main_grad`, the computation is never queued, because the gradient must be returned to autograd."""
        return self._key is not None and main_grad_of(weight) is not None

    def run_or_defer(self, job: Callable[[], None]) -> None:
        """Queue the job if this method is called between `begin` and `end`. Otherwise, run the job immediately."""
        if self._key is None:
            job()
        else:
            self._jobs[self._key].append(job)


def accumulate_weight_grad(
    weight: Tensor, add_: Callable[[Tensor, bool], object], queue: WeightGradQueue | None = None
) -> Tensor | None:
    """Add a weight gradient to `weight.main_grad`, either immediately or through the queue. Return the value that the
    `backward` method of an autograd function must return as the gradient of the weight.

    `add_(out, overwrite)` must compute dW and add it to `out`, which has the weight's shape. If `overwrite` is True,
    `add_` must overwrite `out` with dW instead. `overwrite` is True for the first contribution of a step if `main_grad`
    was not zeroed. If the job is queued, `add_` is called when the job runs, so `add_` can fetch its operands at that
    time. For example, `add_` can gather a sequence-parallel input.

    If the weight is frozen, this function does nothing. If the weight has no `main_grad`, the function computes and
    returns the gradient. The function `weight.before_main_grad`, if set, is called before each contribution and may
    allocate the memory of `main_grad`. The function `weight.on_main_grad`, if set, is called after each contribution.
    `GradReadiness` counts these calls.
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
    """Record whether `weight.main_grad` is stale, that is, whether it still contains the gradient of the previous step.
    The first gradient of a step overwrites a stale `main_grad`."""
    weight.main_grad_is_stale = stale  # type: ignore[attr-defined]


def is_stale(weight: Tensor) -> bool:
    return getattr(weight, "main_grad_is_stale", False)


def rounding_sum(compiled: bool) -> Callable[[Tensor, Tensor], None]:
    """Return a function (total, added) that adds the fp32 tensor `added` to the contiguous bf16 tensor `total` of the
    same shape. The function may overwrite `added`.

    The sum is computed in fp32 and then rounded stochastically, so that its expected value is exact. With rounding to
    nearest, contributions that are smaller than half the distance between two bf16 numbers would be lost. The random
    bits are a hash of both addends, so a repeated step gives the same result.
    """
    return region(_add_rounded_, True, static=True) if compiled else _add_rounded_in_parts_


def _add_rounded_(total: Tensor, added: Tensor, into: Tensor | None = None) -> None:
    key = mixed(added.view(torch.int32)) ^ total.view(torch.int16).to(torch.int32)
    total.copy_(round_to_bf16(torch.add(added, total, out=into), uniform_of(key, SALT)))


def _add_rounded_in_parts_(total: Tensor, added: Tensor) -> None:
    for before, new in zip(total.view(-1).split(ROUNDED_AT_ONCE), added.view(-1).split(ROUNDED_AT_ONCE), strict=True):
        _add_rounded_(before, new, into=new)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the buffer in which the gradients of `weight` are accumulated, or None if autograd accumulates them in
    `weight.grad`."""
    return getattr(weight, "main_grad", None)


def saved_without_graph(ctx: AutogradContext) -> tuple[Tensor, ...]:
    """Return the saved tensors of an autograd function, detached from the autograd graph. A queued weight-gradient job
    that holds tensors with a graph would keep the graph alive."""
    return tuple(x.detach() for x in ctx.saved_tensors)


@torch_function
def add_product_(out: Tensor, dy: Tensor, x: Tensor, overwrite: bool = False) -> None:
    """Add dyᵀ x to `out`, summed in the precision of `out`: out [o, i], dy [n, o], x [n, i]. If `overwrite` is True,
    overwrite `out` with dyᵀ x instead.

    On CPU, a product of bf16 matrices is rounded to bf16 before it is added, because the CPU kernels for bf16 cannot
    return fp32 results. The relative error of each product is at most 2^-9. These kernels are used because they are
    several times as fast as fp32 kernels.
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
    """Add `rows[i]` to `out[index[i]]` for each i, in the precision of `out` and in a fixed order.

    Indices must be in [0, len(out)). On GPUs, the indices are not checked, because the check of `torch.index_put_`
    makes the host wait for the GPU in some versions of torch.
    """
    if out.is_cuda:  # index_put_ has a fixed order, but index_add_ uses atomic operations, whose order varies
        index_put_impl_(out, [index], rows.to(out.dtype), accumulate=True, unsafe=True)
    else:
        out.index_add_(0, index, rows.to(out.dtype))
