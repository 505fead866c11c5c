"""Batched text generation, one token at a time, with a cache of keys and values.

`Engine` runs requests that arrive and end at any time. Each request has its own sampling, seed, stop strings and
log-probabilities. Generation works under any layout (`StageRunner`).
"""

from megatron.extensions.use.inference.generation.engine import Engine, Generation, Request, eos_ids
from megatron.extensions.use.inference.generation.runner import StageRunner
from megatron.extensions.use.inference.generation.sampling import Sampling

__all__ = ["Engine", "Generation", "Request", "Sampling", "StageRunner", "eos_ids"]
