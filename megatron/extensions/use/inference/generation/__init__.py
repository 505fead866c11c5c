"""Batched autoregressive text generation with a key/value cache.

`Engine` implements continuous batching: requests can start and end at any time. Sampling settings, seed, stop strings
and log-probabilities are set separately for each request. Generation works with any parallel layout (`StageRunner`).
"""

from megatron.extensions.use.inference.generation.engine import Engine, Generation, Request, eos_ids
from megatron.extensions.use.inference.generation.runner import StageRunner
from megatron.extensions.use.inference.generation.sampling import Sampling

__all__ = ["Engine", "Generation", "Request", "Sampling", "StageRunner", "eos_ids"]
