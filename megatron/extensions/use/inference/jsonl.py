"""Parsing and validation of JSON requests, for files and the server. A file has one request per line, and the generated
texts are written as JSON lines in the same order."""

from __future__ import annotations

import difflib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeGuard, TypeVar

from megatron.core.config.json_text import parse_json
from megatron.core.tokenizers import Tokenizer
from megatron.extensions.use.inference.chat_template import Message, chat_tokens, plain_messages
from megatron.extensions.use.inference.generation import Engine, Generation, Request, Sampling
from megatron.extensions.use.inference.generation.engine import MOST_LOGPROBS, Logprob, prompt_seed
from megatron.extensions.use.inference.model import LoadedModel

NAMED, NAME_LENGTH = 5, 60
"""`NAMED` is the maximum number of unknown fields that are reported by name. `NAME_LENGTH` is the maximum number of
characters of each reported name."""


Number = TypeVar("Number", int, float, int | None, float | None)


class Fields:
    """Reader of the fields of a JSON object. Errors are collected in `problems` and not raised."""

    def __init__(self, body: Mapping[str, object]) -> None:
        self.body = body
        self.problems: list[tuple[str, str]] = []
        """Errors in the JSON object, as (field, error) pairs."""

    def only(self, known: Collection[str]) -> None:
        """Report an error for every field that is not in `known`. At most `NAMED` unknown fields are reported by name,
        because searching for similar known names takes time."""
        known = frozenset(known)
        wrong = [name for name in self.body if name not in known]
        for name in wrong[:NAMED]:
            near = difflib.get_close_matches(name[:NAME_LENGTH], known, 1)
            shortened = name if len(name) <= NAME_LENGTH else f"{name[:NAME_LENGTH]}..."
            self.refuse(shortened, f"is not a field of this request{f'; did you mean {near[0]}' if near else ''}")
        if len(wrong) > NAMED:
            self.refuse(f"{len(wrong) - NAMED} more", "are not fields of this request")

    def refuse(self, name: str, problem: str) -> None:
        self.problems.append((name, problem))

    def whole(self, name: str, default: Number, least: int = 0, most: int | None = None) -> int | Number:
        """Read an integer from `least` to `most`. If the value is null or missing, return `default`."""
        value = self.body.get(name)
        if value is None:
            return default
        bound = f"from {least} to {most}" if most is not None else f"of at least {least}"
        if type(value) is int and value >= least and (most is None or value <= most):
            return value
        self.refuse(name, f"must be a whole number {bound}, not {shown(value)}")
        return default

    def number(self, name: str, default: Number) -> float | Number:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == inf:
            self.refuse(name, f"must be a number, not {shown(value)}")
            return default
        try:
            return float(value)
        except OverflowError:
            self.refuse(name, "is too large")
            return default

    def switch(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {shown(value)}")
        return value is True

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Read a nonempty string or a list of at most `most` nonempty strings."""
        value = self.body.get(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
            self.refuse(name, f"must be a nonempty text or a list of nonempty texts, not {shown(value)}")
            return ()
        if len(found) > most:
            self.refuse(name, f"has {len(found)} texts; at most {most} are allowed")
        return tuple(found)

    def tokens(self, name: str) -> frozenset[int]:
        value = self.body.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            self.refuse(name, f"must be a list of token ids, not {shown(value)}")
            return frozenset()
        return frozenset(value)

    def sampling(self, default: Sampling) -> Sampling:
        """Read temperature, top_k, top_p, min_p and repetition_penalty. Values that the request omits are taken from
        `default`."""
        top_k = self.whole("top_k", default.top_k, least=-1)
        try:
            return Sampling(
                temperature=self.number("temperature", default.temperature),
                # As in other servers, the values 0 and -1 disable top-k sampling.
                top_k=None if top_k is not None and top_k < 1 else top_k,
                top_p=self.number("top_p", default.top_p),
                min_p=self.number("min_p", default.min_p),
                repetition_penalty=self.number("repetition_penalty", default.repetition_penalty),
            )
        except ValueError as error:
            for line in str(error).splitlines():
                flag, _, problem = line.partition(" ")
                self.refuse(flag.removeprefix("--").replace("-", "_"), problem)
            return default


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def shown(value: object) -> str:
    """Format a value as JSON, truncated to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def parsed(data: bytes) -> dict[str, object]:
    """Parse a JSON object in UTF-8. Raises ValueError with the reason if the bytes are not a JSON object."""
    try:
        value = parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {shown(value)}")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("has an escape such as \\ud83d that is half a character") from None
    return value


KNOWN = (
    *("prompt", "messages", "id", "max_new_tokens", "seed", "stop", "stop_token_ids"),
    *("logprobs", "prompt_logprobs", "token_ids", *SAMPLING_FIELDS),
)
MOST_STOPS = 64


@dataclass(frozen=True)
class Line:
    """Parsed input line: a request, or the errors in the line."""

    number: int
    request: Request | None = None
    problem: str | None = None
    id: object = None
    token_ids: bool = False


def read_lines(
    lines: Iterable[bytes], model: LoadedModel, defaults: Request, template: Callable[[Sequence[Message]], str]
) -> Iterator[Line]:
    """Read the requests in nonblank lines. Values that a line omits are taken from `defaults`, except for the prompt.
    If a line has no seed, a seed is derived from the default seed and the line number."""
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        body: dict[str, object] = {}
        try:
            body = parsed(data)
            fields = Fields(body)
            request_of = _request_of(fields, replace(defaults, seed=prompt_seed(defaults.seed, number - 1)))
            token_ids = fields.switch("token_ids")
            if fields.problems:
                raise ValueError("; ".join(f"{name} {problem}" for name, problem in fields.problems))
            if is_prompt(prompt := body.get("prompt")):
                tokens = model.tokenize(prompt)
            else:
                tokens = chat_tokens(model.tokenizer, template(plain_messages(body["messages"])))
            yield Line(number, request_of(tokens), id=body.get("id"), token_ids=token_ids)
        except ValueError as error:
            yield Line(number, problem=str(error), id=body.get("id"))


def _request_of(fields: Fields, defaults: Request) -> Callable[[Sequence[int]], Request]:
    """Return a function that creates the request of a line from the prompt tokens. Values that the line omits are taken
    from `defaults`. Errors in any field of the line are added to `fields.problems`."""
    fields.only(KNOWN)
    prompt = fields.body.get("prompt")
    if (prompt is None) == (fields.body.get("messages") is None):
        fields.refuse("prompt", "must be given if messages is not given; give exactly one of the two")
    elif not (prompt is None or is_prompt(prompt)):
        fields.refuse("prompt", "must be a text or a list of token ids")
    return partial(
        Request,
        sampling=fields.sampling(defaults.sampling),
        logprobs=fields.whole("logprobs", defaults.logprobs, 0, MOST_LOGPROBS),
        max_new_tokens=fields.whole("max_new_tokens", defaults.max_new_tokens),
        seed=fields.whole("seed", defaults.seed),
        stop=fields.texts("stop", MOST_STOPS) or defaults.stop,
        stop_ids=fields.tokens("stop_token_ids") or defaults.stop_ids,
        eos_ids=defaults.eos_ids,
        prompt_logprobs=fields.switch("prompt_logprobs"),
    )


def is_prompt(value: object) -> TypeGuard[str | list[int]]:
    """Return True if the prompt is a string or a list of token ids."""
    return isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))


def answers(
    lines: Iterable[Line], engine: Engine, tokenizer: Tokenizer, token_ids: bool
) -> Iterator[dict[str, object]]:
    """Yield one object for each line, in order. The object contains text, finish_reason and, if requested, token ids
    and log-probabilities. For a line with an error, the object contains the line number and the error."""
    waiting: deque[Line] = deque()

    def requests() -> Iterator[Request]:
        for line in lines:
            waiting.append(line)
            if line.request is not None:
                yield line.request

    for found in engine.run(requests()):
        while waiting[0].request is None:
            yield answer(waiting.popleft(), None, tokenizer, token_ids)
        yield answer(waiting.popleft(), found, tokenizer, token_ids)
    for line in waiting:
        yield answer(line, None, tokenizer, token_ids)


def answer(line: Line, found: Generation | None, tokenizer: Tokenizer, token_ids: bool) -> dict[str, object]:
    known = {} if line.id is None else {"id": line.id}
    problem = line.problem if found is None else found.error
    if found is None or problem is not None:
        return {**known, "line": line.number, "error": problem}
    answer: dict[str, object] = {**known, "text": found.text, "finish_reason": found.finish_reason}
    if token_ids or line.token_ids:
        answer |= {"prompt_token_ids": list(found.request.prompt), "token_ids": found.tokens}
    if found.request.logprobs is not None:
        answer["logprobs"] = [logprob_object(each, tokenizer) for each in found.logprobs]
    if found.request.prompt_logprobs:
        answer["prompt_logprobs"] = [logprob_object(each, tokenizer) for each in found.prompt_logprobs]
    return answer


def logprob_object(found: Logprob, tokenizer: Tokenizer) -> dict[str, object]:
    def entry(id: int, value: float) -> dict[str, object]:
        return {"token_id": id, "token": tokenizer.detokenize([id]), "logprob": json_logprob(value)}

    top = [entry(id, value) for id, value in found.top]
    return entry(found.token, found.logprob) | ({"top": top} if top else {})


def json_logprob(value: float) -> float:
    """Replace values that JSON cannot represent, such as infinity."""
    return max(value, -9999.0)
