"""Metric that logs the fraction of tokens whose loss is included in the training loss, over all ranks.

python pretrain_gpt.py --extension examples/trained_share.py --eod-mask-loss ...

The metric is named `trained_share` in metrics.jsonl, TensorBoard and Weights & Biases.
"""

import torch
from torch import Tensor

from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback, StepView


@CALLBACKS.register("trained share")
class TrainedShare(Callback):
    def metrics(self):
        return {"trained_share": trained_share}


def trained_share(step: StepView) -> tuple[Tensor, int]:
    """Return the number of tokens whose loss is included in the training loss, and the number of all tokens."""
    masks = [batch.loss_mask for batch in step.batches]
    return torch.stack([mask.sum() for mask in masks]).sum(), sum(mask.numel() for mask in masks)
