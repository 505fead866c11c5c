"""Continuous batching. Each active request occupies a row of the key/value cache until its text is complete; new
requests wait until a row is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.init import site_key
from megatron.core.tokenizers import Tokenizer
from megatron.extensions.use.inference.generation.runner import Pass, StageRunner, token_logprobs
from megatron.extensions.use.inference.generation.sampling import Sampling
from megatron.extensions.use.inference.generation.text import TextStream

MOST_LOGPROBS = 100


@dataclass(frozen=True)
class Request:
    """Request to generate a continuation of a prompt. The constructor raises a ValueError that lists all invalid
    fields."""

    prompt: Sequence[int]
    """Token ids of the prompt, which must not be empty."""

    max_new_tokens: int = 64
    """Maximum number of new tokens. Generation also stops when the text reaches the model's maximum sequence length."""

    sampling: Sampling = field(default_factory=Sampling)

    seed: int = 1234
    """Random seed. The new text depends only on the seed, the prompt and the sampling settings."""

    stop: tuple[str, ...] = ()
    """Strings that end the new text. The new text does not include these strings."""

    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the new text. The new text does not include these tokens."""

    eos_ids: frozenset[int] = frozenset()
    """End-of-text tokens of the model. The new text does not include these tokens."""

    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned at each position, in addition to the
    log-probability of the new token. If None, no log-probabilities are returned. Log-probabilities are computed before
    sampling modifies the logits."""

    prompt_logprobs: bool = False
    """True to also return the log-probabilities of all prompt tokens except the first token."""

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("has no tokens: a model needs at least one to continue")
        if self.max_new_tokens < 0:
            problems.append(f"max_new_tokens {self.max_new_tokens} must not be negative")
        if any(not text for text in self.stop):
            problems.append("a stop string must not be empty: it would end every text at its start")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            problems.append(f"logprobs {self.logprobs} must be from 0 to {MOST_LOGPROBS}")
        if self.prompt_logprobs and self.logprobs is None:
            problems.append("prompt_logprobs needs logprobs")
        if problems:
            raise ValueError("\n".join(problems))


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Most likely tokens at the position, best first, with their log-probabilities."""


WINDOW = 16
"""Number of requests per cache row that `Engine.run` reads ahead and sorts by prompt length."""


@dataclass(eq=False)
class Generation:
    """Generation request, together with the text generated so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New tokens. If a stop string ended the text, the tokens of the stop string are included. A token of `stop_ids` or
    `eos_ids` that ended the text is not included."""

    text: str = ""
    """Text of the new tokens. Characters at the end that later tokens may still change are omitted. Without a
    tokenizer, the text is empty."""

    logprobs: list[Logprob] = field(default_factory=list)
    """Log-probabilities of the new tokens, if the request asks for log-probabilities."""

    prompt_logprobs: list[Logprob] = field(default_factory=list)
    """Log-probabilities of the prompt tokens except the first, if the request asks for log-probabilities."""

    finish_reason: str | None = None
    """Reason for the end of the text: "stop" (a stop string or a token of `stop_ids`), "eos" (a token of `eos_ids`),
    "length" (`max_new_tokens` or the model's maximum length), "cancelled", or "error". The field is None while tokens
    are still being generated."""

    error: str | None = None
    """Message of the error that prevented or interrupted the generation. None if there was no error."""

    stream: TextStream | None = field(default=None, repr=False)
    budget: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator, repr=False)


class Engine:
    """Engine that generates the responses to many requests at once. The engine runs on the leader rank of a
    `StageRunner`.

    At most `rows` sequences are generated at the same time. If all rows are occupied, further requests wait in a queue
    until a row becomes free. A forward pass over several prompts reads at most `prefill_tokens` tokens, including
    padding. A prompt with more tokens is read in a separate pass. `detokenize` is needed to return text or to support
    stop strings.
    """

    def __init__(
        self,
        runner: StageRunner,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        rows: int = 8,
        prefill_tokens: int = 8192,
    ) -> None:
        self.runner = runner
        self.detokenize = detokenize
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.longest, self.vocab_size = runner.config.max_positions, runner.config.vocab_size or 0
        self.waiting: deque[Generation] = deque()
        self.growing: list[Generation] = []
        """Active generations. Entry i occupies row i of the cache."""
        self._drop: list[int] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.growing)

    def submit(self, request: Request) -> Generation:
        """Append a request to the queue. If the request cannot be answered, `finish_reason` is set immediately."""
        found = Generation(request)
        if problem := self.why_refused(request):
            found.finish_reason, found.error = "error", problem
            return found
        found.budget = min(request.max_new_tokens, self.longest - len(request.prompt))
        found.generator.manual_seed(request.seed % 2**64)
        if self.detokenize is not None:
            with self._failures_of([found]):
                found.stream = TextStream(self.detokenize, request.prompt, request.stop)
            if found.finish_reason is not None:
                return found
        if found.budget == 0 and not request.prompt_logprobs:
            found.finish_reason = "length"
            return found
        self.waiting.append(found)
        return found

    def why_refused(self, request: Request) -> str | None:
        """Return the reason why the model cannot process a request. Return None if the model can process it."""
        if (count := len(request.prompt)) >= self.longest:
            return (
                f"has {count} tokens, but the model reads at most {self.longest} (--max-position-embeddings): shorten "
                f"it to {self.longest - 1} or fewer"
            )
        wrong = [token for token in request.prompt if not 0 <= token < self.vocab_size]
        if wrong:
            return f"contains the token {wrong[0]}; tokens must be from 0 to {self.vocab_size - 1} (--vocab-size)"
        if request.stop and self.detokenize is None:
            return "has stop strings, which need a tokenizer"
        return None

    def cancel(self, generation: Generation) -> None:
        """End a request before its text is complete. The cache row of the request becomes free for another request."""
        if generation.finish_reason is None:
            with self._failures_of([generation]):
                self._end(generation, "cancelled")

    def step(self) -> list[Generation]:
        """Read the prompts of waiting requests if rows are free, then add a token to every active sequence. Return the
        generations whose text changed."""
        changed = self._admit() if self.waiting and len(self.growing) < self.rows else []
        if self.growing:
            tokens = tuple(((each.tokens or each.request.prompt)[-1],) for each in self.growing)
            changed += self._advance(Pass(0, tokens, self._dropped()), list(self.growing))
        return list(dict.fromkeys(changed))

    def beat(self) -> None:
        """Run a forward pass without tokens to check that the other ranks are alive. Raises an error if a rank
        failed."""
        self.runner.run(Pass(drop=self._dropped()))

    def stop(self) -> None:
        """Make `StageRunner.follow` return on the other ranks."""
        self.runner.stop()

    def run(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Run all requests, and yield their generations in order. Some requests are read ahead and sorted by prompt
        length, because prompts of similar length need the least padding."""
        found: deque[Generation] = deque()
        source, more = iter(requests), True
        while more or found:
            if more and len(self.waiting) < self.rows:
                taken = [each for _, each in zip(range(WINDOW * self.rows), source, strict=False)]
                more = len(taken) == WINDOW * self.rows
                found += [self.submit(each) for each in taken]
                self.waiting = deque(sorted(self.waiting, key=lambda each: len(each.request.prompt)))
            while found and found[0].finish_reason is not None:
                yield found.popleft()
            if not self.idle:
                self.step()

    def _dropped(self) -> tuple[int, ...]:
        dropped = tuple(self._drop)
        self._drop.clear()
        return dropped

    def _admit(self) -> list[Generation]:
        """Take prompts from the front of the queue and run one forward pass over as many prompts as fit into the
        pass."""
        taken = [self.waiting.popleft()]
        longest, free = len(taken[0].request.prompt), self.rows - len(self.growing)
        while self.waiting and len(taken) < free and not taken[0].request.prompt_logprobs:
            following = self.waiting[0].request
            longest = max(longest, len(following.prompt))
            if following.prompt_logprobs or longest * (len(taken) + 1) > self.prefill_tokens:
                break
            taken.append(self.waiting.popleft())
        first, tokens = len(self.growing), tuple(tuple(each.request.prompt) for each in taken)
        request = taken[0].request
        top = min(request.logprobs or 0, self.vocab_size) if request.prompt_logprobs else None
        self.growing += taken
        return self._advance(Pass(first, tokens, self._dropped(), top), taken)

    def _advance(self, step: Pass, rows: list[Generation]) -> list[Generation]:
        outputs = self.runner.run(step)
        assert outputs is not None
        if outputs.prompt is not None:
            (generation,) = rows
            prompt = zip(generation.request.prompt[1:], outputs.prompt.tolist(), strict=True)
            generation.prompt_logprobs = [logprob_of(token, found) for token, found in prompt]
        # `finite` is also False if any logit is NaN, because amax then returns NaN.
        finite = outputs.logits.amax(-1).isfinite().tolist()
        live = [row for row, each in enumerate(rows) if finite[row] and each.budget]
        for row, generation in enumerate(rows):
            if not finite[row]:
                place = len(generation.request.prompt) + len(generation.tokens)
                generation.error = (
                    f"the model's logits after token {place} are not finite: the checkpoint is damaged, or the run "
                    "that saved it diverged"
                )
                self._end(generation, "error")
            elif not generation.budget:
                self._end(generation, "length")
        if live:
            self._sample(outputs.logits[live], [rows[row] for row in live])
        return rows

    def _sample(self, logits: Tensor, rows: list[Generation]) -> None:
        """Sample the next token of each sequence in `rows` from `logits`, and add the token to the sequence. Sequences
        with equal sampling settings are sampled together."""
        groups: dict[Sampling, list[int]] = {}
        for row, generation in enumerate(rows):
            groups.setdefault(generation.request.sampling, []).append(row)
        for sampling, members in groups.items():
            some = [rows[row] for row in members]
            of_group = logits if len(some) == len(rows) else logits[members]
            tokens: list[int] = []
            with self._failures_of(some):
                tokens = _next_tokens(sampling, some, of_group)
            for generation, token, own in zip(some, tokens, of_group, strict=False):
                with self._failures_of([generation]):
                    self._add(generation, token, own)

    @contextmanager
    def _failures_of(self, rows: list[Generation]) -> Iterator[None]:
        """Context manager that ends the generations in `rows` if the `with` block raises an exception. Other
        generations continue."""
        try:
            yield
        except Exception as error:
            for generation in rows:
                generation.error = f"its text cannot be continued: {type(error).__name__}: {error}"
                # The text decoder may be in an invalid state after the exception.
                generation.stream = None
                self._end(generation, "error")

    def _add(self, generation: Generation, token: int, logits: Tensor) -> None:
        request = generation.request
        if token in request.eos_ids or token in request.stop_ids:
            self._end(generation, "eos" if token in request.eos_ids else "stop")
            return
        generation.tokens.append(token)
        if request.logprobs is not None:
            top = min(request.logprobs, self.vocab_size)
            (found,) = token_logprobs(logits[None], torch.tensor([token], device=logits.device), top).tolist()
            generation.logprobs.append(logprob_of(token, found))
        if generation.stream is not None:
            generation.text += generation.stream.add(token)
            if generation.stream.stopped:
                self._end(generation, "stop")
                return
        if len(generation.tokens) >= generation.budget:
            self._end(generation, "length")

    def _end(self, generation: Generation, reason: str) -> None:
        generation.finish_reason = reason
        if generation.stream is not None:
            generation.text += generation.stream.finish()
            if generation.stream.stopped and reason == "length":
                generation.finish_reason = "stop"
            generation.stream = None
        if generation in self.growing:
            row = self.growing.index(generation)
            self.growing[row] = self.growing[-1]
            self.growing.pop()
            self._drop.append(row)
        elif generation in self.waiting:
            self.waiting.remove(generation)


def _next_tokens(sampling: Sampling, rows: Sequence[Generation], logits: Tensor) -> list[int]:
    """Sample the next token of each sequence in `rows` from `logits`. All sequences use the same sampling settings."""
    uniform = [float(torch.rand((), generator=each.generator, dtype=torch.float64)) for each in rows]
    earlier = [[*each.request.prompt, *each.tokens] for each in rows] if sampling.repetition_penalty != 1 else ()
    tokens: list[int] = sampling.next_tokens(logits, torch.tensor(uniform, dtype=torch.float64), earlier).tolist()
    return tokens


def logprob_of(token: int, found: Sequence[float]) -> Logprob:
    """Return the `Logprob` of `token`. `found` is a row of the tensor that `token_logprobs` returns."""
    count = len(found) // 2
    best = zip(map(int, found[1 : 1 + count]), found[1 + count :], strict=True)
    return Logprob(token, found[0], tuple(best))


def eos_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens that end a generated text."""
    return frozenset(token for token in (tokenizer.eod, tokenizer.eos) if token is not None)


def prompt_seed(seed: int, number: int) -> int:
    """Return the random seed for the prompt at position `number` in a list of prompts. `seed` is the seed of the whole
    list."""
    return site_key(seed, f"prompt {number}")
