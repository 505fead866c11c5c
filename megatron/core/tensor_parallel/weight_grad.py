"""The weight gradients of linear layers: added to `main_grad` at once, or kept for later.

A backward pass has two halves: the input gradient, which the pipeline stage before is waiting for, and the weight
gradient, which nobody waits for. Zero-bubble schedules (arXiv 2401.10241) run the second one in what would be idle
time. `WeightGradQueue` is where the halves part; the pipeline executor owns it and hands it to the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

CONVERTED_AT_ONCE = 2**19
"""Elements of a bf16 product that become fp32 at a time on CPU: as many as its cache holds."""


class WeightGradQueue:
    """Adds dW = dYᵀ X to `weight.main_grad`: in the backward pass, or for passes between `begin` and `end` in `run`."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, list[Callable[[], None]]] = {}
        self._key: Hashable | None = None

    @property
    def deferring(self) -> bool:
        return self._key is not None

    def begin(self, key: Hashable) -> None:
        """From here on, backward passes leave their weight gradients under `key`."""
        assert key is not None and self._key is None, f"{key} begins before {self._key} has ended"
        assert key not in self._jobs, f"the weight gradients of {key} have not been run"
        self._key = key
        self._jobs[key] = []

    def end(self) -> None:
        """Backward passes do their weight gradients themselves again."""
        assert self._key is not None, "end() without begin()"
        self._key = None

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Does the work left under `key`, in the order of its backward pass, and frees what it needed."""
        assert key != self._key, f"{key} has not ended"
        jobs = self._jobs.pop(key)
        jobs.reverse()
        while jobs:
            jobs.pop()()

    def assert_empty(self) -> None:
        """For the end of a step: no gradient may be left behind."""
        assert self._key is None, f"{self._key} has not ended"
        assert not self._jobs, f"weight gradients left undone: {list(self._jobs)}"

    def accumulate(self, weight: Tensor, add_: Callable[[Tensor], None]) -> None:
        """weight [..., in] with a main_grad, which `add_` is handed as a matrix [out, in] to add dW to. It is called
        only then, so that it may fetch what it needs, as a sequence-parallel input has to be gathered first."""
        self._do(lambda: add_weight_grad_(weight, add_))

    def accumulate_grouped(self, weight: Tensor, grad_output: Tensor, x: Tensor, splits: Sequence[int]) -> None:
        """weight [groups, ..., in] with a main_grad, grad_output [n, ...], input [n, in]: of the n rows each group has
        the next `splits[group]`. A group without rows gets nothing."""
        self._do(lambda: add_grouped_weight_grad_(weight, grad_output, x, splits))

    def _do(self, job: Callable[[], None]) -> None:
        if self._key is None:
            job()
        else:
            self._jobs[self._key].append(job)


def saved_without_graph(ctx: Any) -> tuple[Tensor, ...]:
    """What a Function saved, without the graph that made it: in a queue it would hold on to that graph's inputs, which
    the backward is done with."""
    return tuple(x.detach() for x in ctx.saved_tensors)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The buffer that gradients of `weight` are summed in, if it has one; else they go to autograd."""
    return getattr(weight, "main_grad", None)


def main_grad_added(weight: Tensor) -> None:
    """Says that a contribution to `weight.main_grad` is in, to whoever set `weight.on_main_grad`."""
    notify = getattr(weight, "on_main_grad", None)
    if notify is not None:
        notify()


def add_weight_grad_(weight: Tensor, add_: Callable[[Tensor], None]) -> None:
    """Has `add_` add to weight.main_grad, as a matrix [out, in]."""
    main_grad = main_grad_of(weight)
    assert main_grad is not None
    add_(main_grad.view(-1, main_grad.shape[-1]))
    main_grad_added(weight)


def add_grouped_weight_grad_(weight: Tensor, grad_output: Tensor, x: Tensor, splits: Sequence[int]) -> None:
    """weight.main_grad[group] += grad_outputᵀ x over the group's rows"""
    main_grad = main_grad_of(weight)
    assert main_grad is not None
    add_grouped_product_(main_grad.view(len(splits), -1, x.shape[-1]), grad_output, x, splits)
    main_grad_added(weight)


def add_grouped_product_(out: Tensor, dy: Tensor, x: Tensor, splits: Sequence[int]) -> None:
    """out [groups, o, i] += dyᵀ x, group by group: dy [n, o], x [n, i]"""
    parts = zip(out, dy.split(list(splits)), x.split(list(splits)), strict=True)
    for group_out, group_dy, group_x in parts:
        if group_x.shape[0]:
            add_product_(group_out, group_dy, group_x)


def add_product_(out: Tensor, dy: Tensor, x: Tensor) -> None:
    """out [o, i] += dy [n, o]ᵀ x [n, i], summed in the precision of `out`.

    On CPU, whose bf16 kernels have no fp32 result but are several times as fast as fp32 ones, the product of bf16
    matrices is rounded once, to bf16, before it is added: a relative error of at most 2^-9 of what a micro-batch adds.
    """
    if out.dtype == dy.dtype:
        out.addmm_(dy.t(), x)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)
    elif dy.dtype == torch.bfloat16:
        rows = max(1, CONVERTED_AT_ONCE // out.shape[1])
        for part, product in zip(out.split(rows), dy.t().mm(x).split(rows), strict=True):
            part.add_(product)
    else:
        out.addmm_(dy.t().to(out.dtype), x.to(out.dtype))


def add_rows_(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """out[index[i]] += rows[i], in the precision of `out` and in an order that is the same each time.

    Indices must lie in [0, len(out)): on GPUs nobody looks, as `index_put_` would read the largest and the smallest
    on the host in some versions of torch.
    """
    if out.is_cuda:  # sorts; index_add_ would race
        torch.ops.aten._index_put_impl_(out, [index], rows.to(out.dtype), accumulate=True, unsafe=True)
    else:
        out.index_add_(0, index, rows.to(out.dtype))
