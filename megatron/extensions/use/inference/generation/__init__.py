"""Text from a model: one token after the other, with cached keys and values, many texts at once.

`Engine` runs requests that come and go, each with its own sampling, seed, stop strings and log-probabilities, at any
layout (`StageRunner`).
"""

from megatron.extensions.use.inference.generation.engine import Engine, Generation, Request, eos_ids
from megatron.extensions.use.inference.generation.runner import StageRunner
from megatron.extensions.use.inference.generation.sampling import Sampling

__all__ = ["Engine", "Generation", "Request", "Sampling", "StageRunner", "eos_ids"]
