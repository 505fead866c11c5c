"""Forward and backward of a micro-batch as one CUDA graph, recorded once and replayed.

Launching a small model's kernels one by one takes longer than running them; a graph is launched at once. It repeats the
same kernels on the same memory, so what goes in is copied to where the recorded batch lay, and what comes out, the
loss, is copied away; parameters and gradient sums lie in flat buffers that never move, and dropout is a function of the
samples' numbers, which go in. `graph_rules` says what cannot be recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.batch import Batch

Replay = Callable[[], None]


class Recorder(Protocol):
    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Calls `run`, whose work on the device is recorded and not done. What it returned, which has its values only
        after the returned function has been called, and again after each call."""


class CudaRecorder:
    """torch's CUDA graphs, on the current stream, which must not be the default one.

    Other threads, which read data and pin memory, may go on meanwhile: only what this one does is watched. Garbage is
    collected before, as what holds device memory must not be freed in a recording.
    """

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                result = run()
        finally:
            if collecting:
                gc.enable()
        return result, graph.replay


class GraphedMicrobatches:
    """Runs micro-batches one after the other: in the first `warm_up_steps` steps as they come, then from a recording.

    `run(batch, seed)` is the forward and the backward of seed * loss sum, and returns the loss sum. All micro-batches
    have one shape. The gradients of the batch that is recorded are added by its first replay: recording computes
    nothing.
    """

    def __init__(
        self,
        run: Callable[[Batch, Tensor], Tensor],
        recorder: Recorder,
        warm_up_steps: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.run, self.recorder, self.warm_up_steps = run, recorder, warm_up_steps
        self._seed = torch.ones((), dtype=dtype, device=device)
        self._steps = 0
        self._inputs: Batch | None = None
        self._loss = self._seed
        self._replay: Replay | None = None

    def train(self, batches: Sequence[Batch], seed: float) -> list[Tensor]:
        """The loss sum of each micro-batch of a step."""
        self._seed.fill_(seed)
        self._steps += 1
        if self._steps <= self.warm_up_steps:
            return [self.run(batch, self._seed) for batch in batches]
        return [self._train_one(batch) for batch in batches]

    def _train_one(self, batch: Batch) -> Tensor:
        if self._inputs is None or self._replay is None:
            copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
            inputs = replace(batch, **copies)
            self._loss, self._replay = self.recorder.record(lambda: self.run(inputs, self._seed))
            self._inputs = inputs
        else:
            _copy_into(self._inputs, batch)
        self._replay()
        return self._loss.clone()


def _copy_into(inputs: Batch, batch: Batch) -> None:
    old, new = inputs.tensors(), batch.tensors()
    assert old.keys() == new.keys(), f"recorded with {sorted(old)}, now {sorted(new)}"
    assert batch.documents == inputs.documents, "documents are not in a recording"
    for name, tensor in new.items():
        assert tensor.shape == old[name].shape, f"{name} is {tuple(tensor.shape)}, recorded {tuple(old[name].shape)}"
        old[name].copy_(tensor)
