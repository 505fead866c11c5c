"""Text from a model: one token after the other, with cached keys and values, many texts at once.

`Engine` runs requests that come and go, each with its own sampling, seed, stop strings and log-probabilities, at any
layout (`StageRunner`).
"""

from megatron.extensions.inference.generation.engine import Engine, Generation, Request, eos_ids
from megatron.extensions.inference.generation.runner import StageRunner
from megatron.extensions.inference.generation.sampling import Sampling

__all__ = ["Engine", "Generation", "Request", "Sampling", "StageRunner", "eos_ids"]
