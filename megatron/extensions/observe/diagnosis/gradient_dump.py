"""Dump of one training step, with everything that tools/referee.py needs to verify the step (--dump-step).

The folder contains a checkpoint of the weights before the step, the samples in the format of a saved step, and

    gradients-RANK.safetensors   gradients of the mean loss on this rank, in fp32 or fp64; each tensor is a shard with
                                 the key `NAME@OFFSET` (comma-separated offsets); the metadata has the global shapes
    loss.json                    the mean loss over the tokens that count, in nats
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.collectives import all_reduce_, gather_objects
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.extensions.observe.diagnosis.step_dump import SavedStep, save_step
from megatron.training.hooks import Callback, Meter, StepView
from megatron.training.progress import Step
from megatron.training.run import TrainingRun

GRADIENTS = "gradients-*.safetensors"
LOSS = "loss.json"
SHAPES = "shapes"
"""Metadata key of a gradient file. The value is a JSON object that maps the name of each parameter to its global
shape."""


class GradientDump(Callback, Meter):
    """Callback that writes the gradients, weights and samples of one step to disk. Training continues afterwards."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.run, own = run, run.config.options(DiagnosisConfig)
        self._iteration = own.dump_step
        self._folder = Path(own.dump_step_dir) if own.dump_step_dir else self._within_save(own.dump_step)
        self._step: Step | None = None
        return (self,)

    def _within_save(self, iteration: int | None) -> Path:
        save = self.run.config.checkpoint.save_folder
        assert save is not None, "a rule requires --dump-step-dir or a folder in --save"
        return save / "steps" / f"iter_{iteration:07d}"

    def begin_step(self, step: Step) -> None:
        self._step = step if step.iteration == self._iteration else None

    def reads_result(self, iteration: int) -> bool:
        return iteration == self._iteration

    def gradients_ready(self, factor: Tensor) -> None:
        """Dump the gradients. This method is called before the update, when the weights are still the weights of the
        forward and backward passes."""
        if self._step is None:
            return
        run, step = self.run, self._step
        run.saver.wait()
        before = replace(run.progress, iteration=step.iteration - 1, consumed_samples=step.first_sample)
        batches = run.data.train.next_step(step.first_sample, step.samples)
        saved = SavedStep(step, run.optimizer.loss_scale, None)
        save_step(self._folder, saved, batches, run.saver.checkpoint, before)
        run.ddp.gather_grads_()
        boxes, shapes = self._boxes(factor)
        file = self._folder / f"gradients-{run.runtime.launch.rank:05d}.safetensors"
        if boxes:
            save_file(boxes, file, metadata={SHAPES: json.dumps(shapes)})
        gather_objects(file.name, run.runtime.state.world)  # wait for all ranks, so that the dump is complete on return

    def _boxes(self, factor: Tensor) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
        """Return two dicts. The first dict contains the gradient shards whose first replica is on this rank, keyed by
        `NAME@OFFSET`. The second dict contains the global shape of each parameter, keyed by the name of the
        parameter."""
        boxes: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        state = self.run.runtime.state
        params: list[Any] = self.run.ddp.params
        for param in params:
            meta = param.meta
            if meta.is_first_replica(state.coords) and state.axis(meta.data_axis).first:
                offset, _ = meta.box(state.coords)
                grad = param.main_grad * factor.to(param.main_grad.dtype)
                boxes[f"{meta.name}@{','.join(map(str, offset))}"] = grad.to("cpu", copy=True).contiguous()
                shapes[meta.name] = meta.global_shape
        return boxes, shapes

    def after_update(self, step: StepView, result: StepResult) -> None:
        if self._step is None:
            return
        total, tokens = all_reduce_(step.loss_and_tokens.clone(), self.run.runtime.state.world).tolist()[:2]
        if self.run.runtime.is_main:
            (self._folder / LOSS).write_text(json.dumps({"loss": total / max(tokens, 1.0)}))
            self.run.runtime.say(f" dumped iteration {self._step.iteration} to {self._folder}")
        self._step = None


def read_box(name: str) -> tuple[str, tuple[int, ...]]:
    """Split a key of a gradient file into parameter name and offset."""
    parameter, _, offset = name.rpartition("@")
    return parameter, tuple(int(number) for number in offset.split(",") if number)


def assembled(shape: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Assemble the whole gradient of a parameter in fp64 from its shards. Each entry of `boxes` contains the offset and
    the values of a shard. Raises ValueError if the shards do not cover the gradient."""
    whole = torch.full(tuple(shape), torch.nan, dtype=torch.float64)
    covered = 0
    for offset, values in boxes:
        whole[tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))] = values
        covered += values.numel()
    if covered != whole.numel():
        raise ValueError(f"the shards cover only {covered:,} of {whole.numel():,} values")
    return whole
