"""Run the forward and backward pass of a micro-batch as one CUDA graph, which is recorded once and replayed.

Launching the kernels of a small model one by one takes longer than running them. A CUDA graph needs only one launch,
and replays the recorded kernels on the recorded memory addresses. The inputs of each micro-batch are therefore copied
to the recorded addresses before the replay, and the loss is copied from its recorded address after the replay.
Parameters and gradient sums are in flat buffers that never move. Dropout depends only on the sample indices, which are
among the copied inputs. `flags.py` lists the features that CUDA graphs do not support.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.linear_gemms import MadeCasts, WeightCasts
from megatron.core.transformer.pass_context import PassContext
from megatron.extensions.speed.cuda_graphs.flags import CudaGraphFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.forward_backward import Pipeline
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime
from megatron.training.step_parts import StepParts

Replay = Callable[[], None]


class Recorder(Protocol):
    """Interface for recording the kernels that a function launches, and for replaying them."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]: ...


class CudaRecorder:
    """Recorder that uses torch's CUDA graphs on the current stream, which must not be the default stream.

    Recordings share memory, except for tensors that are still referenced. Only one recording may therefore be replayed
    at a time. During a recording, other threads may read data and pin memory, because only the calls of the recording
    thread are captured. Garbage collection runs first, because device memory must not be freed during a recording.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Call `run`, and record the kernels that it launches without executing them. Returns the result of `run` and a
        function that replays the recording. Each replay writes new values to this result."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                result = run()
        finally:
            if collecting:
                gc.enable()
        return result, graph.replay


class GraphedMicrobatches:
    """Run micro-batches one after another. The first `warm_up_steps` steps run eagerly, and later steps replay a
    recording.

    `run(batch, seed)` computes the loss sum in a forward pass, runs the backward pass of `seed` times the loss sum, and
    returns the loss sum. All micro-batches must have the same shape. Recording does not execute kernels. The recorded
    batch is therefore also replayed once, which adds its gradients. With fp8, there are two recordings. The recording
    for the first micro-batch of a step also casts the weights to fp8, and the recording for all other micro-batches
    reuses these casts."""

    def __init__(
        self,
        run: Callable[[Batch, Tensor], Tensor],
        recorder: Recorder,
        warm_up_steps: int,
        device: torch.device,
        dtype: torch.dtype,
        casts: WeightCasts | None = None,
    ) -> None:
        self.run = run
        self.recorder = recorder
        self.warm_up_steps = warm_up_steps
        self.casts = casts or WeightCasts()
        self._made: MadeCasts = {}
        self._seed = torch.ones((), dtype=dtype, device=device)
        self._steps = 0
        self._inputs: Batch | None = None
        self._recordings: dict[bool, tuple[Tensor, Replay]] = {}
        """Loss tensor and replay function of each recording. The key is True for the recording that also casts the
        weights to fp8."""

    def train(self, batches: Sequence[Batch], seed: float) -> list[Tensor]:
        """Return the loss sum of each micro-batch of a step."""
        self._seed.fill_(seed)
        self._steps += 1
        if self._steps <= self.warm_up_steps:
            with self.casts.kept():
                return [self.run(batch, self._seed) for batch in batches]
        return [self._train_one(batch, first=number == 0) for number, batch in enumerate(batches)]

    def _train_one(self, batch: Batch, first: bool) -> Tensor:
        if self._inputs is None:
            copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
            self._inputs = replace(batch, **copies)
        else:
            _copy_into(self._inputs, batch)
        makes_casts = first or not self._made
        if makes_casts not in self._recordings:
            inputs = self._inputs

            def run() -> Tensor:
                if makes_casts:
                    self._made.clear()
                with self.casts.kept(self._made):
                    return self.run(inputs, self._seed)

            self._recordings[makes_casts] = self.recorder.record(run)
        loss, replay = self._recordings[makes_casts]
        replay()
        return loss.clone()


def _copy_into(inputs: Batch, batch: Batch) -> None:
    old, new = inputs.tensors(), batch.tensors()
    assert old.keys() == new.keys(), f"recorded with {sorted(old)}, now {sorted(new)}"
    assert batch.documents == inputs.documents, "document boundaries cannot be recorded"
    for name, tensor in new.items():
        assert tensor.shape == old[name].shape, f"{name} is {tuple(tensor.shape)}, recorded {tuple(old[name].shape)}"
        old[name].copy_(tensor)


class GraphedPipeline(Pipeline):
    """Pipeline that trains micro-batches by replaying their recorded CUDA graphs."""

    may_overwrite = False  # a recording may be replayed for several micro-batches, so it must add to gradients

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        stages: Mapping[int, GPTModel],
        passes: PassContext,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(config, runtime, stages, passes)
        warm_up = config.options(CudaGraphFlags).cuda_graph_warmup_steps
        main_dtype = getattr(torch, config.parallel.main_dtype)
        self.graph = GraphedMicrobatches(
            self._one, recorder or CudaRecorder(), warm_up, runtime.device, main_dtype, passes.casts
        )

    def train(self, batches: Sequence[Batch], seed: float) -> list[Tensor]:
        return self.graph.train(batches, seed)

    def _one(self, batch: Batch, seed: Tensor) -> Tensor:
        (loss,) = self.executor.run(self.lists(1)[self.pp.rank], [batch], loss_scale_seed=seed)
        return loss


class SideStream(Callback):
    """Switch from the default CUDA stream to a new stream. The default stream cannot be captured. The callback switches
    streams before the model is built, because autograd computes a parameter's gradient on the stream on which the
    parameter was first used. Raises ValueError on CPUs."""

    def on_setup(self, runtime: Runtime) -> None:
        if runtime.device.type != "cuda":
            impl = self.config.options(CudaGraphFlags).cuda_graph_impl
            raise ValueError(f"--cuda-graph-impl {impl} records GPU work, but this run uses CPUs; remove the flag")
        torch.cuda.set_stream(torch.cuda.Stream(runtime.device))


PARTS = StepParts(pipeline=GraphedPipeline)
