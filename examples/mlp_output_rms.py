"""Meter that logs the root mean square of MLP outputs over all layers, ranks and tokens of a log interval.

python pretrain_gpt.py --extension examples/mlp_output_rms.py ...

The value is named `mlp_output_rms` in metrics.jsonl, TensorBoard and Weights & Biases.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback, Meter
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun


@CALLBACKS.register("outputs of MLPs")
class MlpOutputs(Callback, Meter):
    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.of_step, self.sums = (torch.zeros(2, dtype=torch.float64, device=run.runtime.device) for _ in range(2))
        for layer in (layer for stage in run.stages.values() for layer in stage.decoder.layers):
            if hasattr(layer, "mlp"):  # some layers of a --hybrid-layer-pattern have no MLP
                layer.mlp.register_forward_hook(self.count)
        return (self,)

    def count(self, mlp: nn.Module, inputs: Any, output: Tensor) -> None:
        self.of_step += torch.stack([output.detach().double().square().sum(), self.sums.new_tensor(output.numel())])

    def begin_step(self, step: Step) -> None:
        self.of_step.zero_()  # discard counts of an evaluation or of a repeated step

    def end_step(self, skip: Tensor) -> None:
        self.sums += self.of_step * (1 - skip)

    def step_state(self) -> list[Tensor]:
        return [self.sums]

    def take(self) -> Tensor:
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken

    def report(self, summed: Tensor, interval: Interval) -> dict[str, Any]:
        squares, count = summed.tolist()
        return {"mlp_output_rms": (squares / count) ** 0.5 if count else None}
