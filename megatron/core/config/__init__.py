"""Configuration as frozen dataclasses, from which all command-line flags are generated.

Each field of a dataclass is a command-line flag with the name that Megatron-LM uses. The string below a field is the
help text of the flag. This package does not import torch, so that a login node can read, validate and plan a run.
"""

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig, PrecisionConfig

__all__ = [
    "DDPConfig",
    "DatasetConfig",
    "MoEConfig",
    "ModelParallelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "TokenizerConfig",
    "TransformerConfig",
    "flag",
]
