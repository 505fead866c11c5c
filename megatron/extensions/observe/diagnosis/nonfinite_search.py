"""Search for the origin of a NaN or infinity, by running the step again with hooks on every module.

The search runs the forward passes first. For each of its pipeline stages and micro-batches, every rank records the
first module whose output contains a NaN or infinity. If the outputs of all modules are finite, the search runs the
backward passes with hooks that check the gradients of every module's inputs. In addition, weight gradients are checked
after each backward action of the pipeline. The result is the first finding of all ranks. Findings are ordered by pass,
then by position in the model, then by sample, so the result does not depend on the parallel layout. Random numbers are
functions of the seed and a position, so the second run computes the same values as the first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.batch import Batch
from megatron.core.collectives import gather_objects
from megatron.core.init import has_storage
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.tensor_parallel.weight_grad import is_stale
from megatron.core.transformer.activation_store import tensors_in
from megatron.training.forward_backward import ForwardBackward, Pipeline
from megatron.training.progress import Step

FORWARD = "forward"
BACKWARD = "backward"
WEIGHT_GRADIENT = "weight gradient"
PASSES = (FORWARD, BACKWARD, WEIGHT_GRADIENT)
LOSS = "loss"
"""Name that reports use for the root module of the last pipeline stage, whose output is the cross entropy."""


@dataclass(frozen=True)
class Finding:
    """First module or parameter with a non-finite value."""

    where: str
    """Pass in which the non-finite value occurred; one of `PASSES`."""

    module: str
    """Name of the module in the whole model. If the non-finite value is in a weight gradient, this field contains the
    name of the parameter."""

    samples: tuple[int, ...]
    """Indices of the samples with non-finite values. If the tensor has no batch dimension, the tuple contains the
    indices of all samples in the micro-batch."""

    microbatch: int
    rank: int
    stage: int
    sources_finite: bool
    """True if all inputs of the module were finite, which means that the module itself produced the non-finite
    value."""

    largest: float = 0.0
    """Largest absolute value in the inputs of the module."""

    place: int = 0
    """Position of the module in the order in which the pass runs the modules of a pipeline stage."""

    weights: tuple[str, ...] = ()
    """Names of the parameters that had non-finite values before the step."""

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key of a finding. A finding that occurs earlier in the step has a smaller key."""
        stage = self.stage if self.where == FORWARD else -self.stage
        return PASSES.index(self.where), stage, self.place, min(self.samples, default=0), self.rank

    def same_as(self, other: Finding | None) -> bool:
        """Return True if another finding has the same pass and the same module. The two findings may come from
        different parallel layouts."""
        return other is not None and (self.where, self.module) == (other.where, other.module)

    def describe(self) -> str:
        samples = ("sample " if len(self.samples) == 1 else "samples ") + ", ".join(map(str, self.samples))
        given = "inputs" if self.where == FORWARD else "gradients"
        if self.where == WEIGHT_GRADIENT:
            made = "the gradients of all activations were finite"
        elif self.sources_finite:
            made = f"its {given} were finite, the largest {self.largest:.3g}"
        else:
            made = f"its {given} were already non-finite, so an earlier operation is the origin"
        weights = f"not finite before the step: {', '.join(self.weights)}" if self.weights else "all finite"
        return (
            f"first in the {self.where}{'' if self.where == WEIGHT_GRADIENT else ' pass'}: {self.module} "
            f"(rank {self.rank}, pipeline stage {self.stage}), micro-batch {self.microbatch}, {samples}; {made}; "
            f"weights: {weights}"
        )

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Finding:
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**known)


def search(passes: ForwardBackward, step: Step, batches: list[Batch], loss_scale: float) -> Finding | None:
    """Run a step again and return the first non-finite value, or None if all values are finite this time. This is a
    collective that returns the same result on every rank. The search discards the gradients in the gradient buffers.

    Args:
        passes: Object that runs the forward and backward passes of the run.
        step: Step to run again.
        batches: Micro-batches of the step on this rank.
        loss_scale: Loss scale that the step used.
    """
    world = passes.runtime.state.world
    passes.ddp.finish_grad_sync()  # wait for gradient reductions that are in progress
    passes.ddp.finish_param_sync()
    bad = [piece.meta.name for piece in passes.ddp.sharded_params() if not _finite(piece.data)]
    bad += [p.meta.name for p in passes.ddp.params if has_storage(p) and not _finite(p)]  # type: ignore[attr-defined]
    weights = tuple(sorted({name for names in gather_objects(bad, world) for name in names}))
    seed = passes.loss_seed(loss_scale)
    passes.ddp.begin_step(0)  # with 0 micro-batches, the backward passes reduce no gradients
    scaled, _ = passes.with_scale(step, batches, seed)
    first = None
    for where in (FORWARD, BACKWARD):
        notes = _Notes(passes.runtime.launch.rank, passes.pipeline.executor, scaled)
        if where == FORWARD:
            with _look_forward(passes.pipeline, notes):
                passes.pipeline.evaluate(scaled)
        else:
            with _look_backward(passes.pipeline, passes.ddp.params, notes):
                passes.pipeline.train_plainly(scaled, seed)
        found = [note for notes_of_rank in gather_objects(notes.found, world) for note in notes_of_rank]
        first = min(found, key=lambda note: note.order, default=None)
        if first is not None:
            break
    passes.discard_step()
    return None if first is None else replace(first, weights=weights)


class _Notes:
    """Findings of this rank, at most one for each pipeline stage and micro-batch."""

    def __init__(self, rank: int, executor: PipelineExecutor[GPTModel, Batch], batches: list[Batch]) -> None:
        self.rank = rank
        self.executor = executor
        self.batches = batches
        self.found: list[Finding] = []
        self._calls: dict[tuple[int, int], int] = {}

    def look(self, where: str, module: str, results: object, sources: object) -> None:
        """Record a finding if `results` contains a non-finite value. `module` computed `results` from `sources` in the
        current pipeline action."""
        action = self.executor.current
        assert action is not None
        key = action.stage, action.microbatch
        self._calls[key] = self._calls.get(key, 0) + 1
        bad = [tensor for tensor in tensors_in(results) if not _finite(tensor)]
        if bad and not any((note.stage, note.microbatch) == key for note in self.found):
            largest = max((_largest(tensor) for tensor in tensors_in(sources)), default=0.0)
            self.add(where, module, action, self._samples(bad[0], action), largest, self._calls[key])

    def add(
        self, where: str, module: str, action: Action, samples: tuple[int, ...], largest: float, place: int
    ) -> None:
        at, fine = (action.microbatch, self.rank, action.stage), math.isfinite(largest)
        self.found.append(Finding(where, module, samples, *at, fine, largest, place))

    def _samples(self, tensor: Tensor, action: Action) -> tuple[int, ...]:
        """Return the indices of the samples for which `tensor` [s, b, ...] contains a non-finite value. If the tensor
        has a different shape, return the indices of all samples in the micro-batch."""
        numbers = self.samples_of(action)
        if tensor.ndim < 3 or tensor.shape[1] != len(numbers):
            return numbers
        bad = ~torch.isfinite(tensor).transpose(0, 1).flatten(1).all(1)
        return tuple(number for number, is_bad in zip(numbers, bad.tolist(), strict=True) if is_bad)

    def samples_of(self, action: Action) -> tuple[int, ...]:
        return tuple(self.batches[action.microbatch].sample_index.tolist())


@contextmanager
def _look_forward(pipeline: Pipeline, notes: _Notes) -> Iterator[None]:
    def hook(name: str, module: nn.Module, args: object, output: object) -> None:
        notes.look(FORWARD, name, output, args)

    with ExitStack() as handles:
        for name, module in _modules(pipeline):
            handles.callback(module.register_forward_hook(partial(hook, name)).remove)
        yield


@contextmanager
def _look_backward(pipeline: Pipeline, params: Sequence[nn.Parameter], notes: _Notes) -> Iterator[None]:
    def hook(name: str, module: nn.Module, grad_inputs: object, grad_outputs: object) -> None:
        notes.look(BACKWARD, name, grad_inputs, grad_outputs)

    def look_at_gradients(action: Action) -> None:
        """Record the last parameter in the model whose gradient is not finite. This function is called after each
        pipeline action."""
        if notes.found or action.kind not in (Kind.B, Kind.W):
            return
        for place, param in enumerate(reversed(params)):
            main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
            if has_storage(main_grad) and not is_stale(param) and not _finite(main_grad):
                name = param.meta.name  # type: ignore[attr-defined]
                notes.add(WEIGHT_GRADIENT, name, action, notes.samples_of(action), 0.0, place)
                return

    executor = pipeline.executor
    with ExitStack() as handles, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing|For backward hooks to be called")
        for name, module in _modules(pipeline):
            handles.callback(module.register_full_backward_hook(partial(hook, name)).remove)
        handles.callback(partial(setattr, executor, "after", executor.after))
        executor.after = look_at_gradients
        yield


def _modules(pipeline: Pipeline) -> Iterator[tuple[str, nn.Module]]:
    """Yield a pair (name in the whole model, module) for each module in this rank's pipeline stages."""
    for stage, model in pipeline.stages.items():
        for name, module in model.named_modules():
            yield _global_name(model, name, stage), module


def _global_name(model: GPTModel, name: str, stage: int) -> str:
    """Convert the name of a module in a pipeline stage to its name in the whole model: `decoder.layers.0.mlp` in a
    stage that starts with layer 6 is `decoder.layers.6.mlp`."""
    if not name:
        return LOSS if model.last else f"stage {stage}"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(model.decoder.layers[int(parts[2])].number)
    return ".".join(parts)


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value in a tensor; 0 for integer and empty tensors. NaN and infinity propagate to the
    result."""
    return tensor.detach().abs().max().item() if tensor.is_floating_point() and tensor.numel() else 0.0


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
