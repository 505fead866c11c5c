"""Text from a model: one token after the other, with cached keys and values, many texts at once.

`generate` continues token ids with a model of one process. `Engine` does it for requests that come and go, each with
its own sampling, seed, stop strings and log-probabilities, at any layout (`StageRunner`).
"""

from megatron.core.models.gpt.generation.engine import Engine, Generation, generate
from megatron.core.models.gpt.generation.request import Request
from megatron.core.models.gpt.generation.runner import StageRunner
from megatron.core.models.gpt.generation.sampling import Sampling

__all__ = ["Engine", "Generation", "Request", "Sampling", "StageRunner", "generate"]
