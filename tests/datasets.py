"""Data sets as a run builds them, from arguments in place of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import Datasets
from megatron.core.datasets.gpt_dataset import SampleFormat
from megatron.core.parts import DATASETS


def build_datasets(
    config: DatasetConfig,
    *,
    seq_length: int,
    seed: int,
    sizes: Sequence[int | None],
    eod: int | None = None,
    vocab_size: int | None = None,
) -> Datasets:
    """The splits of a run; `sizes` are the samples of train, valid and test."""
    switches = config.eod_mask_loss, config.reset_position_ids, config.reset_attention_mask
    return DATASETS[config.dataset](config, SampleFormat(seq_length, eod, vocab_size, *switches), seed, sizes)
