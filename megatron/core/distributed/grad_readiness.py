"""Tracks which buckets are ready, so that gradient reductions and parameter all-gathers can overlap with computation.

A bucket can be reduced when the gradients of its parameters are complete. To detect that a gradient is complete, every
parameter reports each contribution to its `main_grad`. If a layer adds weight gradients itself, each use of the
parameter in the layer causes one report. If autograd computes the gradients of the parameter, autograd first sums the
gradients, and the sum causes one report. Every micro-batch therefore causes the same number of reports. A gradient is
complete after (reports per micro-batch) * (micro-batches) reports. Counting reports works for any order of backward
passes, for split backward passes, and for parameters that several stages share. Because reports are counted, a schedule
does not have to mark the last backward pass of a step.

A bucket's all-gather must end before a module reads the parameters. Each module therefore waits, before it runs, for
the buckets of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from megatron.core.distributed.param_and_grad_buffer import Bucket


class GradReadiness:
    """Counter of gradient contributions, which starts the reduction of a bucket when the gradients of all its
    parameters are complete. A parameter reports each contribution to its gradient. During the first step, the counter
    learns the number of reports per micro-batch, and starts no reduction early. A parameter whose number of reports
    differs between micro-batches never counts as complete, so its bucket is reduced at the end of the step. `start(k)`
    starts all reductions up to bucket k, so all ranks start them in the same order, regardless of the order in which
    gradients arrive.
    """

    def __init__(self, params: Sequence[nn.Parameter], buckets: Sequence[Bucket], start: Callable[[int], None]) -> None:
        self.params = params
        self.buckets = buckets
        self.start = start
        self.bucket_of = bucket_numbers(buckets)
        self.per_microbatch: list[float] | None = None
        self.microbatches = 0
        for i in self.bucket_of:
            param = params[i]
            param.on_main_grad = partial(self.report, i)  # type: ignore[attr-defined]
        self.begin_step(0)

    def begin_step(self, microbatches: int) -> None:
        """Start a step with `microbatches` micro-batches. `microbatches` is 0 if the number is not known."""
        self.microbatches = microbatches
        self.reports = [0] * len(self.params)
        self.missing = [len(bucket.layout.params) for bucket in self.buckets]
        self.started = 0

    def report(self, param: int) -> None:
        """Count one contribution to the gradient of the parameter with the number `param`."""
        bucket = self.bucket_of[param]
        assert bucket >= self.started, (
            f"{self.params[param].meta.name} got a gradient after its bucket was reduced"  # type: ignore[attr-defined]
        )
        self.reports[param] += 1
        if self.per_microbatch is None or not self.microbatches:
            return
        if self.reports[param] == self.per_microbatch[param] * self.microbatches:
            self.missing[bucket] -= 1
            while self.started < len(self.missing) and self.missing[self.started] == 0:
                self.start(self.started)
                self.started += 1

    def end_step(self) -> None:
        """End a step after all of its gradients are complete."""
        if self.per_microbatch is None and self.microbatches and any(self.reports):
            counts = (count / self.microbatches for count in self.reports)
            self.per_microbatch = [count if count and count.is_integer() else float("inf") for count in counts]
        self.begin_step(0)


def wait_before_forward(
    modules: Sequence[nn.Module], params: Sequence[nn.Parameter], buckets: Sequence[Bucket]
) -> None:
    """Make each module wait, before its forward pass, for the all-gather of the parameters that it reads.

    A layer, which is an entry of a ModuleList, waits for all its parameters, so that the layer may read them in any
    order. A module outside of layers waits only for its direct parameters, not for those of its submodules.
    """
    number = {id(param): i for i, param in enumerate(params)}
    bucket_of = bucket_numbers(buckets)
    for module in modules:
        for unit, read in units_of(module):
            wanted = {bucket_of[number[id(param)]] for param in read if id(param) in number}
            unit.register_forward_pre_hook(partial(_finish, [buckets[k] for k in sorted(wanted, reverse=True)]))


def bucket_numbers(buckets: Sequence[Bucket]) -> dict[int, int]:
    """Return the position in `buckets` of each parameter's bucket, keyed by the index of the parameter."""
    return {place.index: k for k, bucket in enumerate(buckets) for place in bucket.layout.params}


def units_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, list(child.parameters())
        else:
            yield from units_of(child)


def _finish(buckets: Sequence[Bucket], module: nn.Module, args: object) -> None:
    for bucket in buckets:
        bucket.finish_param_sync()
