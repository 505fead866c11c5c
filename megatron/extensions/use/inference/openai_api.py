"""OpenAI API for completions and chat completions. This module converts JSON requests to `Request` objects, and
`Generation` objects to JSON responses.

https://platform.openai.com/docs/api-reference/completions and .../chat. Like other servers, this API also supports
top_k, min_p, repetition_penalty and stop_token_ids.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron.core.init import site_key
from megatron.extensions.use.inference.chat_template import ChatTemplate, chat_tokens, plain_messages
from megatron.extensions.use.inference.generation import Engine, Generation, Request, Sampling, eos_ids
from megatron.extensions.use.inference.generation.engine import Logprob
from megatron.extensions.use.inference.jsonl import SAMPLING_FIELDS, Fields, is_prompt, json_logprob, shown
from megatron.extensions.use.inference.model import LoadedModel


class ApiError(Exception):
    """Error that is sent to the client as the response to a refused request."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        kinds = {404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """Upper limits on the size of a single request."""

    choices: int = 16
    """Maximum number of choices per request, which is the number of prompts times n."""

    new_tokens: int = 4096
    """Maximum value of max_tokens in a request."""

    stops: int = 16


@dataclass(frozen=True)
class Call:
    """Parsed API request for a completion or a chat completion. requests[i] is the generation request for choice i."""

    requests: list[Request]
    chat: bool
    stream: bool
    include_usage: bool
    echo: bool
    prompts: list[str]
    """Prompt text of each choice. The list is empty unless the request asks to echo prompts."""

    n: int
    id: str
    created: int = field(default_factory=lambda: int(time.time()))


SHARED = (
    *("model", "n", "max_tokens", "stream", "stream_options", "stop", "stop_token_ids", "seed", "user"),
    *SAMPLING_FIELDS,
)
COMPLETION_FIELDS = (*SHARED, "prompt", "logprobs", "echo", "suffix", "best_of")
CHAT_FIELDS = (*SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "response_format")
INERT: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
}
"""Request fields for features that are not supported. Each field is mapped to its neutral values, which are accepted
because they do not request the feature."""


class OpenAIApi:
    """OpenAI-compatible API for completions and chat completions with a single model."""

    def __init__(
        self, model: LoadedModel, engine: Engine, name: str, limits: Limits, template: Callable[[], ChatTemplate]
    ) -> None:
        self.model = model
        self.engine = engine
        self.name = name
        self.limits = limits
        self.template = template
        self.created = int(time.time())

    def models(self) -> dict[str, object]:
        found = {"id": self.name, "object": "model", "created": self.created, "owned_by": "local"}
        return {"object": "list", "data": [found | {"max_model_len": self.engine.longest}]}

    def call(self, body: Mapping[str, object], chat: bool) -> Call:
        """Parse a request. `chat` is True for a chat completion and False for a completion. Raises an ApiError that
        lists every wrong field."""
        fields = Fields(body)
        fields.only([*(CHAT_FIELDS if chat else COMPLETION_FIELDS), *INERT])
        if body.get("model") not in (None, self.name):
            message = f"there is no model {shown(body['model'])} here; this server has {self.name}"
            raise ApiError(404, message, "model", "model_not_found")
        for name, values in INERT.items():
            if body.get(name) is not None and body[name] not in values:
                fields.refuse(name, f"{shown(body[name])} is not supported; leave it out")
        options = body.get("stream_options")
        if options is not None and not (isinstance(options, dict) and body.get("stream") is True):
            fields.refuse("stream_options", "must be an object, and can be given only with stream: true")
        prompts = self._messages(fields) if chat else self._prompts(fields)
        requests = self._requests(fields, prompts, chat)
        if fields.problems:
            name, _ = fields.problems[0]
            raise ApiError(400, "; ".join(f"{each}: {problem}" for each, problem in fields.problems), name)
        for request in requests:
            if problem := self.engine.why_refused(request):
                code = "context_length_exceeded" if len(request.prompt) >= self.engine.longest else None
                raise ApiError(400, f"the prompt {problem}", "messages" if chat else "prompt", code)
        n, echo = len(requests) // max(1, len(prompts)), not chat and body.get("echo") is True
        texts = (each if isinstance(each, str) else self.model.tokenizer.detokenize(each) for each in prompts)
        return Call(
            requests,
            chat,
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            echo=echo,
            prompts=[text for text in texts for _ in range(n)] if echo else [],
            n=n,
            id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        )

    def _requests(self, fields: Fields, prompts: Sequence[str | list[int]], chat: bool) -> list[Request]:
        body, limits = fields.body, self.limits
        n = fields.whole("n", 1, 1, limits.choices)
        if len(prompts) * n > limits.choices:
            fields.refuse(
                "n", f"requests {len(prompts) * n} texts; this server generates at most {limits.choices} per request"
            )
        if not chat and body.get("best_of") not in (None, n):
            fields.refuse("best_of", "must equal n or be left out")
        asked = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
        budget = fields.whole(asked, limits.new_tokens if chat else min(16, limits.new_tokens), 0)
        if budget > limits.new_tokens:
            fields.refuse(asked, f"{budget} exceeds the limit of this server, {limits.new_tokens}")
        echo = fields.switch("echo") if not chat else False
        stream = fields.switch("stream")
        if chat:
            top = fields.whole("top_logprobs", 0, 0, 20)
            logprobs = top if fields.switch("logprobs") else None
            if body.get("top_logprobs") is not None and logprobs is None:
                fields.refuse("top_logprobs", "needs logprobs: true")
        else:
            logprobs = fields.whole("logprobs", None, 0, 20)
            if echo and stream and logprobs is not None:
                fields.refuse("echo", "cannot be combined with stream and logprobs; leave out one of them")
        seed = fields.whole("seed", None, -(2**63), 2**64)
        base = secrets.randbits(63) if seed is None else seed
        request_of = partial(
            Request,
            max_new_tokens=budget,
            sampling=fields.sampling(Sampling(1.0)),
            stop=fields.texts("stop", limits.stops),
            stop_ids=fields.tokens("stop_token_ids"),
            eos_ids=eos_ids(self.model.tokenizer),
            logprobs=logprobs,
            prompt_logprobs=echo and logprobs is not None,
        )
        if fields.problems:
            return []
        try:
            return [
                request_of(prompt, seed=base if choice == 0 else site_key(base, f"choice {choice}"))
                for prompt in map(self.model.tokenize, prompts)
                for choice in range(n)
            ]
        except ValueError as error:
            # The tokenizer cannot encode one of the prompts.
            fields.refuse("prompt", str(error))
            return []

    def _prompts(self, fields: Fields) -> list[str | list[int]]:
        """Read the prompts of a request. Each prompt is a string or a list of token ids."""
        value = fields.body.get("prompt", "")
        several = isinstance(value, list) and value and not is_prompt(value)
        given = value if several and isinstance(value, list) else [value]
        found = [each for each in given if is_prompt(each) and each != []]
        if not found or len(found) < len(given):
            fields.refuse("prompt", "must be a text, a list of token ids, or a list of these; lists must not be empty")
            return []
        return found

    def _messages(self, fields: Fields) -> list[list[int]]:
        try:
            text = self.template()(plain_messages(fields.body.get("messages")))
        except ValueError as error:
            fields.refuse("messages", str(error))
            return []
        return [chat_tokens(self.model.tokenizer, text)]

    # Answers

    def answer(self, call: Call, found: Sequence[Generation]) -> dict[str, object]:
        """Return the complete answer to the request `call`. `found` contains one generation per choice."""
        choices = []
        for index, each in enumerate(found):
            text = (call.prompts[index] if call.echo else "") + each.text
            logprobs = None
            if each.request.logprobs is not None:
                logprobs = self._chat_logprobs(each.logprobs) if call.chat else self.text_logprobs(call, each)
            said = {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
            choices.append(choice(index, said, logprobs, each.finish_reason))
        return self._object(call, choices) | {"usage": usage(call, [len(each.tokens) for each in found])}

    def chunk(
        self, call: Call, index: int, text: str, tokens: Sequence[Logprob] | None, reason: str | None, first: bool
    ) -> dict[str, object]:
        """Return a chunk of a streamed answer. The chunk contains a piece of one choice's text, the log-probabilities
        of the tokens in the piece, and the finish reason. `first` is True for the first chunk of a choice."""
        delta: dict[str, object] = {"role": "assistant"} if first else {}
        delta |= {"content": text} if text or first else {}
        logprobs = None
        if tokens is not None:
            logprobs = self._chat_logprobs(tokens) if call.chat else self._completion_logprobs(tokens, 0)
        said = {"delta": delta} if call.chat else {"text": text}
        return self._object(call, [choice(index, said, logprobs, reason)], ".chunk")

    def last_chunk(self, call: Call, counts: Sequence[int]) -> dict[str, object]:
        """Return the last part of a streamed answer, which contains the token counts."""
        return self._object(call, [], ".chunk") | {"usage": usage(call, counts)}

    def _object(self, call: Call, choices: Sequence[Mapping[str, object]], part: str = "") -> dict[str, object]:
        kind = f"chat.completion{part}" if call.chat else "text_completion"
        return {"id": call.id, "object": kind, "created": call.created, "model": self.name, "choices": choices}

    def text_logprobs(self, call: Call, found: Generation) -> Mapping[str, object]:
        """Return the log-probabilities of a completion and of an echoed prompt. The first token of a prompt has no
        log-probability."""
        if not call.echo:
            return self._completion_logprobs(found.logprobs, 0)
        start = self.model.tokenizer.detokenize(found.request.prompt[:1])
        parts = self._completion_logprobs([*found.prompt_logprobs, *found.logprobs], len(start))
        heads = {"tokens": start, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: None if value is None else [heads[name], *value] for name, value in parts.items()}

    def _completion_logprobs(self, tokens: Sequence[Logprob], offset: int) -> dict[str, Sequence[object] | None]:
        detokenize = self.model.tokenizer.detokenize
        texts = [detokenize([each.token]) for each in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [{detokenize([id]): json_logprob(value) for id, value in reversed(each.top)} for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [json_logprob(each.logprob) for each in tokens],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, tokens: Sequence[Logprob]) -> dict[str, object]:
        def entry(id: int, value: float) -> dict[str, object]:
            text = self.model.tokenizer.detokenize([id])
            return {"token": text, "logprob": json_logprob(value), "bytes": list(text.encode("utf-8", "replace"))}

        content = [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(id, value) for id, value in each.top]}
            for each in tokens
        ]
        return {"content": content}


def usage(call: Call, counts: Sequence[int]) -> dict[str, int]:
    """Return the number of prompt tokens, the number of generated tokens, and the sum of both. `counts` contains the
    number of generated tokens of each choice. Each prompt is counted once, even if n > 1."""
    prompts = sum(len(request.prompt) for request in call.requests[:: call.n])
    return {"prompt_tokens": prompts, "completion_tokens": sum(counts), "total_tokens": prompts + sum(counts)}


def choice(
    index: int, said: Mapping[str, object], logprobs: Mapping[str, object] | None, reason: str | None
) -> dict[str, object]:
    """Return the JSON object for one choice of an answer, or for a chunk of a choice. `said` contains the generated
    text, and `reason` is the finish reason."""
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": "stop" if reason == "eos" else reason}
