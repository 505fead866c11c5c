"""Update of optimizer states in host memory, overlapped with copies of gradients and parameters
(--optimizer-cpu-offload).

As in ZeRO-Offload (Ren et al., arXiv 2101.06840, section 4), gradients are copied to the host, the host updates states
and parameters, and parameters are copied back. States never leave the host, so they need no pinned memory. Gradients
and parameters are copied chunk by chunk through a few reusable host buffers (slots). While one chunk is updated, the
gradients of the next chunk and the parameters of the previous chunk are copied, with a separate stream for each
direction. While the host updates its states, the device updates the states that are in device memory.

Unlike in ZeRO-Offload, updates are never delayed to the next step: the update is complete when the step returns. The
result equals the result of the same optimizer on the device, except for rounding differences between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.host_to_device import HostCopy, threads_on_host
from megatron.core.optimizer.optimizer import Rates, Shard, ShardUpdate, StepValues
from megatron.extensions.memory.offload.flags import HostStateFlags
from megatron.extensions.memory.offload.placement import host_slots


class CopyQueue:
    """Queue of copies between device and host. The copies run in order on a separate stream. Without a GPU, copies are
    synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start_after(self, event: torch.cuda.Event | None = None) -> None:
        """Make later copies wait for `event`. If `event` is None, the later copies wait for all work launched on the
        current stream."""
        if self._stream is not None:
            self._stream.wait_event(event or torch.cuda.current_stream(self._stream.device).record_event())

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start copying `source` to `target`. Return an event that completes when the copy is complete, or None without
        a GPU."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    @contextmanager
    def after_copies(self) -> Iterator[None]:
        """Context manager for kernels that must wait for the copies started so far. Kernels launched after the `with`
        block do not wait."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Wait, on the host, for the copies started so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self) -> None:
        """Make the current stream wait for the copies started so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Slots:
    """Host buffers (slots), which successive chunks of gradients or parameters use in turn. Each buffer is a tensor
    [elements]. For each buffer, an event marks the end of the last copy from or to the buffer."""

    def __init__(self, number: int, elements: int, dtype: torch.dtype, pinned: bool) -> None:
        self.tensors = [torch.empty(elements, dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(number)]
        self._events: list[torch.cuda.Event | None] = [None] * number

    def start_copy(self, chunk: int, copy: Callable[[Tensor], torch.cuda.Event | None]) -> None:
        """Call `copy` with the host buffer (slot) of a chunk. `copy` starts an asynchronous copy to or from this
        buffer."""
        place = chunk % len(self.tensors)
        self._events[place] = copy(self.tensors[place])

    def ready(self, chunk: int) -> Tensor:
        """Return the host buffer (slot) of a chunk. If a copy from or to this buffer is in progress, wait until it is
        complete."""
        place = chunk % len(self.tensors)
        if (event := self._events[place]) is not None:
            event.synchronize()
        return self.tensors[place]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class HostUpdate:
    """Optimizer update of the shards whose states are in host memory. `chains[i]` is the update of `shards[i]`."""

    def __init__(
        self,
        config: OptimizerConfig,
        shards: Sequence[Shard],
        chains: Sequence[ShardUpdate],
        threads: int | None,
    ) -> None:
        """Allocate the slots.

        Args:
            config: Optimizer configuration.
            shards: Optimizer shards that keep their states in host memory.
            chains: Optimizer update of each shard, in the order of `shards`.
            threads: Number of CPU threads for the update. None uses torch's default.
        """
        options = config.options(HostStateFlags)
        copied = [pair for pair in zip(shards, chains, strict=True) if not pair[0].bucket.on_host]
        self.shards, self.chains = [shard for shard, _ in copied], [chain for _, chain in copied]
        """Shards whose gradients and parameters are on the device and therefore must be copied, and the optimizer
        update of each of these shards."""
        self._here = [pair for pair in zip(shards, chains, strict=True) if pair[0].bucket.on_host]
        number, elements = host_slots([shard.numel for shard in self.shards])
        params, grads = shards[0].device_params, shards[0].device_grads
        self.device = shards[0].bucket.device
        on_gpu = self.device.type == "cuda"
        self._grads = Slots(number, elements, grads.dtype, on_gpu and options.pin_cpu_grads)
        self._params = Slots(number, elements, params.dtype, on_gpu and options.pin_cpu_params)
        self._number, self._threads = number, threads
        self._to_host, self._to_device = CopyQueue(self.device), CopyQueue(self.device)

    @property
    def nbytes(self) -> int:
        """Number of bytes of host memory in use, not counting the states."""
        return self._grads.nbytes + self._params.nbytes

    def start(self) -> None:
        """Start copying the first gradients to the host. The gradients must be complete, except that `update` may still
        multiply all gradients by one factor. Kernels must not read the parameters between the calls to `start` and
        `update`."""
        self._to_host.start_after()
        self._to_device.start_after()
        for chunk in range(self._number):
            self._start_grads(chunk)

    def scalars(self, skip: Tensor, updates: Tensor, factor: Tensor | None) -> HostCopy:
        """Start the device-to-host copy of the scalars that `update` needs. Because the copy starts now, `update` does
        not wait for kernels that are launched between the two calls."""
        return HostCopy[float](torch.stack([skip, updates, torch.ones_like(skip) if factor is None else factor]))

    def update(self, rates: Rates, scalars: HostCopy, scaled: bool) -> None:
        """Perform the update that `start` began, with the `scalars` of this step. If `scaled` is True, gradients are
        multiplied by the factor in `scalars`. The call waits for the gradients. Kernels that are launched after the
        call read the new parameters."""
        skip, updates, factor = (torch.tensor(value, dtype=torch.float64) for value in scalars.read())
        if skip > 0:
            return
        with threads_on_host(self._threads):
            values, used = StepValues(rates, skip, updates), factor if scaled else None
            for chunk, (shard, chain) in enumerate(zip(self.shards, self.chains, strict=True)):
                grads, params = self._grads.ready(chunk)[: shard.numel], self._params.ready(chunk)[: shard.numel]
                _update(shard, chain, grads, params, values, used)
                self._start_params(chunk)
                if chunk + self._number < len(self.shards):
                    self._start_grads(chunk + self._number)
            for shard, chain in self._here:
                _update(shard, chain, shard.device_grads, shard.device_params, values, used)
        self._to_device.join()

    def _start_grads(self, chunk: int) -> None:
        shard = self.shards[chunk]
        self._grads.start_copy(chunk, lambda slot: self._to_host.copy(shard.device_grads, slot[: shard.numel]))

    def _start_params(self, chunk: int) -> None:
        shard = self.shards[chunk]
        self._params.start_copy(chunk, lambda slot: self._to_device.copy(slot[: shard.numel], shard.device_params))


def _update(
    shard: Shard, chain: ShardUpdate, grads: Tensor, params: Tensor, values: StepValues, factor: Tensor | None
) -> None:
    """Update a shard from gradients in host memory, and write the parameters to host memory. Gradients are first
    multiplied by `factor`."""
    shard.attach(grads, params)
    if factor is not None:
        chain.scale_gradients(factor)
    chain.step(values)
    shard.write_params()
