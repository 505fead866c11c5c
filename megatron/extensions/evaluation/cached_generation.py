"""Greedy continuations of prompts by the model's generation engine, with cached keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.collectives import gather_objects
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.tokenizers import Tokenizer
from megatron.extensions.evaluation.generation import Limits, eos_ids
from megatron.extensions.inference.generation import Engine, Request, StageRunner

ROWS = 64
"""Texts that grow at once."""


@dataclass(frozen=True)
class CachedGeneration:
    """Continues prompts at a layout without context parallelism."""

    stages: Mapping[int, GPTModel]
    state: ParallelState
    stage_ranks: Sequence[int]
    """Pipeline rank of each stage."""

    tokenizer: Tokenizer
    prefill_tokens: int
    """Tokens of prompts in one forward pass."""

    together: bool = False
    """Whether replicas of the model must run the same passes, because experts or parameters are spread over them. Else
    they share the prompts."""

    def __call__(self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits]) -> list[str]:
        """The most likely continuation of each prompt, on every rank. Collective."""
        control = self.state.world if self.together else self.state.axis("mp")
        first, step = (0, 1) if self.together else (self.state.dp.rank, self.state.dp.size)
        runner = StageRunner(self.stages, self.state, self.stage_ranks, control)
        found: dict[int, str] = {}
        if runner.leads:
            numbers = range(first, len(prompts), step)
            found = dict(zip(numbers, self._run(runner, prompts[first::step], limits[first::step]), strict=True))
        else:
            runner.follow()
        texts = {number: text for part in gather_objects(found, self.state.world) for number, text in part.items()}
        return [texts[number] for number in range(len(prompts))]

    def _run(self, runner: StageRunner, prompts: Sequence[Sequence[int]], limits: Sequence[Limits]) -> list[str]:
        engine = Engine(runner, self.tokenizer.detokenize, ROWS, self.prefill_tokens)
        ends = eos_ids(self.tokenizer)
        requests = (
            Request(prompt, limit.max_tokens, stop=limit.until, eos_ids=ends)
            for prompt, limit in zip(prompts, limits, strict=True)
        )
        texts = [self.tokenizer.detokenize(found.tokens) for found in engine.run(requests)]
        engine.stop()
        return [limit.cut(text) for limit, text in zip(limits, texts, strict=True)]
