"""Parameters of attention beside Mamba-2: those of both. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.registry import imported
from megatron.extensions.mamba.parameters import mamba_metas


def parallel_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> Iterator[ParamMeta]:
    """The parameters of a layer, in the order in which it makes them."""
    yield from imported(config.attention_facts.parameters)(f"{name}.attention", config, sequence_parallel)
    yield from mamba_metas(f"{name}.mamba", config, sequence_parallel)
