"""Goldfish loss (arXiv:2406.10209), which excludes 1/k of the tokens from the loss. A hash of the preceding tokens
decides whether a token is excluded.

python pretrain_gpt.py --extension examples/goldfish_loss.py --loss-func goldfish --goldfish-k 4 ...
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.batch import Batch
from megatron.core.config import TransformerConfig
from megatron.core.config.losses import LOSSES
from megatron.core.models.gpt.loss import CrossEntropy
from megatron.training.extensions import extension_flags


@extension_flags("goldfish loss")
@dataclass(frozen=True)
class GoldfishConfig:
    goldfish_k: int = 4
    """Exclude 1/k of the tokens from the loss, where k is this value."""
    goldfish_h: int = 13
    """Number of tokens that the hash covers."""


@LOSSES.register("goldfish", multi_token=True, log_likelihood=True)
class GoldfishLoss(CrossEntropy):
    @staticmethod
    def prepare(config: TransformerConfig, batch: Batch) -> Batch:
        options = config.options(GoldfishConfig)
        before = F.pad(batch.tokens, (options.goldfish_h - 1, 0)).unfold(1, options.goldfish_h, 1)
        primes = torch.arange(options.goldfish_h) * 2_654_435_761 + 40_503
        kept = (before * primes).sum(-1).bitwise_right_shift(
            7
        ) % options.goldfish_k != 0  # [b, s], equal under all layouts
        return replace(batch, loss_mask=batch.loss_mask * kept)
