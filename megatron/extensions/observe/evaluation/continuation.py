"""Greedy continuation of prompts by a model that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from megatron.core.collectives import gather_objects
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.tokenizers import Tokenizer, tokenize_beginning
from megatron.extensions.observe.evaluation.rows import Row, prefix_token
from megatron.extensions.observe.evaluation.scoring import Scorer
from megatron.extensions.use.inference.generation import Engine, Request, StageRunner, eos_ids

MOST_TOKENS = 256
"""Default of `max_gen_toks` in lm-evaluation-harness."""


class GenerationOptions(TypedDict, total=False):
    """The generation_kwargs of lm-evaluation-harness that this module supports."""

    max_gen_toks: int | None
    max_new_tokens: int | None
    max_tokens: int | None
    max_completion_tokens: int | None
    until: str | Sequence[str] | None
    do_sample: bool | None
    temperature: float


def greedy_request(
    tokenizer: Tokenizer,
    context: str,
    options: GenerationOptions,
    longest: int,
    most_tokens: int = MOST_TOKENS,
) -> tuple[Request, int]:
    """Return the request to continue a context, and the number of tokens that were truncated on the left.

    Args:
        tokenizer: Tokenizer of the model.
        context: Text to continue. An empty text starts a document.
        options: generation_kwargs of lm-evaluation-harness.
        longest: Context length of the model in tokens.
        most_tokens: Default of max_gen_toks.

    Raises:
        ValueError: `max_gen_toks` leaves no room for a prompt within the context length of the model.
    """
    limits = (
        options.get("max_gen_toks"),
        options.get("max_new_tokens"),
        options.get("max_tokens"),
        options.get("max_completion_tokens"),
    )
    new = next((int(limit) for limit in limits if limit is not None), most_tokens)
    if (room := longest - new) < 1:
        raise ValueError(f"max_gen_toks {new} leaves no room for a prompt in the {longest} tokens that the model reads")
    until = options.get("until") or []
    stop = tuple(filter(None, [until] if isinstance(until, str) else until))
    tokens = tokenize_beginning(tokenizer, context) or [prefix_token(tokenizer)]
    return Request(tokens[-room:], new, stop=stop, eos_ids=eos_ids(tokenizer)), max(0, len(tokens) - room)


def until_stop(text: str, request: Request) -> str:
    """Truncate a text before the first stop string."""
    for each in request.stop:
        text = text.partition(each)[0]
    return text


def continue_requests(
    requests: Sequence[Request], tokenizer: Tokenizer, next_tokens: Callable[[Sequence[Sequence[int]]], list[int]]
) -> list[str]:
    """Return the most likely continuation of each prompt.

    A continuation ends at a stop string, at an end-of-document token, or at the maximum number of tokens. All texts
    grow together, by one token at a time. For each new token, the model runs a forward pass over the complete texts,
    which works under any parallel layout. `next_tokens` accepts a list of token sequences, and returns the next token
    of each sequence.
    """
    new: list[list[int]] = [[] for _ in requests]
    growing = [number for number, request in enumerate(requests) if request.max_new_tokens]
    while growing:
        texts = [[*requests[number].prompt, *new[number]] for number in growing]
        still = []
        for number, token in zip(growing, next_tokens(texts), strict=True):
            request = requests[number]
            if token in request.eos_ids:
                continue
            new[number].append(token)
            text = tokenizer.detokenize(new[number])
            if text == until_stop(text, request) and len(new[number]) < request.max_new_tokens:
                still.append(number)
        growing = still
    return [until_stop(tokenizer.detokenize(tokens), each) for each, tokens in zip(requests, new, strict=True)]


def next_tokens(scorer: Scorer, texts: Iterable[Sequence[int]]) -> list[int]:
    """Return the most likely next token of each text. Texts that exceed the context length are truncated on the left.
    Collective."""
    rows = [Row((*text[-scorer.longest :], 0), 0) for text in texts]
    return [score.next_token for score in scorer(rows)]


ROWS = 64
"""Maximum number of texts that are continued at the same time."""


@dataclass(frozen=True)
class CachedGeneration:
    """Callable that continues prompts with a key/value cache. Context parallelism is not supported."""

    stages: Mapping[int, GPTModel]
    state: ParallelState
    layout: PipelineLayout
    tokenizer: Tokenizer
    prefill_tokens: int
    """Maximum number of prompt tokens in one forward pass."""

    together: bool = False
    """True if all model replicas must run the same passes, which is the case if experts or parameters are sharded over
    the replicas.

    If False, the prompts are divided among the replicas.
    """

    def __call__(self, requests: Sequence[Request]) -> list[str]:
        """Return the most likely continuation of each prompt, on every rank. Collective."""
        control = self.state.world if self.together else self.state.axis("mp")
        first, step = (0, 1) if self.together else (self.state.dp.rank, self.state.dp.size)
        runner = StageRunner(self.stages, self.state, self.layout, control)
        found: dict[int, str] = {}
        if runner.leads:
            engine, numbers = Engine(runner, self.tokenizer.detokenize, ROWS, self.prefill_tokens), range(len(requests))
            for number, each in zip(numbers[first::step], engine.run(requests[first::step]), strict=True):
                found[number] = until_stop(self.tokenizer.detokenize(each.tokens), each.request)
            engine.stop()
        else:
            runner.follow()
        texts = {number: text for part in gather_objects(found, self.state.world) for number, text in part.items()}
        return [texts[number] for number in range(len(requests))]
