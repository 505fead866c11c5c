"""Changes that packing makes to other flags. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace

from megatron.extensions.data.packing.flags import PackingConfig
from megatron.training.config.run_config import RunConfig


def with_documents_apart(config: RunConfig) -> RunConfig:
    """If documents are packed, return a configuration in which documents do not attend to each other. Positions also
    restart at each document if the model has a table of position embeddings. Otherwise, return the configuration
    unchanged."""
    if not config.options(PackingConfig).packs or config.tokenizer.tokenizer_type is None:
        return config
    table = config.model.position_table
    data = replace(config.data, reset_attention_mask=True, reset_position_ids=config.data.reset_position_ids or table)
    return replace(config, data=data)
