"""Cross-entropy with label smoothing (arXiv 1512.00567, section 7). The example shows how a loss adds its own reduction
over the sharded vocabulary.

python pretrain_gpt.py --extension examples/label_smoothing.py --loss-func label_smoothing --label-smoothing 0.1 ...

The target probability of the label is 1 - e + e / V. The target probability of every other token is e / V. The loss of
a token is therefore

    -log p(label) + e * (logit of the label - mean of all logits)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.collectives import reduce_from
from megatron.core.config.flag_spec import flag
from megatron.core.config.losses import LOSSES
from megatron.core.models.gpt.loss import CrossEntropy
from megatron.core.tensor_parallel.cross_entropy import local_columns
from megatron.training.extensions import extension_flags


@extension_flags("label smoothing")
@dataclass(frozen=True)
class LabelSmoothingConfig:
    label_smoothing: float = flag(0.1, at_least=0, below=1)
    """Probability that is spread evenly over the vocabulary."""


@LOSSES.register("label_smoothing", multi_token=True)
class LabelSmoothing(CrossEntropy):
    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [s, b, V/tp], labels [s, b] -> losses [s, b]"""
        tp, size = self.ctx.tp, self.config.vocab_size
        first, columns = local_columns(logits, size, tp)
        wide = torch.promote_types(logits.dtype, torch.float32)

        # This rank's term of (logit of the label - mean of all logits). If another rank holds the label, the label's
        # logit counts as 0 here.
        elsewhere = (labels < first) | (labels >= first + columns)
        index = (labels - first).masked_fill(elsewhere, 0)
        label_logit = logits.gather(-1, index[..., None]).squeeze(-1).to(wide).masked_fill(elsewhere, 0.0)
        term = label_logit - logits[..., :columns].sum(-1, dtype=wide) / size

        # Pass a copy, because the cross-entropy overwrites its logits, which the backward pass of `gather` still needs.
        cross_entropy = super().__call__(logits.clone(), labels)
        return cross_entropy + self.config.options(LabelSmoothingConfig).label_smoothing * reduce_from(term, tp)
