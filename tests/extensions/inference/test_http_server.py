"""Tests of the OpenAI-compatible HTTP API, served from this process: answers, refused requests, limits, and misbehaving
clients."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.config.data import TokenizerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers import ByteTokenizer
from megatron.extensions.use.inference import jsonl
from megatron.extensions.use.inference import serving as engine_loops
from megatron.extensions.use.inference.chat_template import ChatTemplate
from megatron.extensions.use.inference.generation import Engine, Request, Sampling, StageRunner
from megatron.extensions.use.inference.http_server import ApiServer, HttpLimits
from megatron.extensions.use.inference.model import LoadedModel
from megatron.extensions.use.inference.openai_api import Limits, OpenAIApi, choice
from megatron.extensions.use.inference.serving import EngineLoop, Progress
from megatron.training.config.run_config import RunConfig
from tests.gpt_cases import FP64, LLAMA
from tests.limits import HANG, wait_for

LENGTH = 64
TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"


class Endless(ByteTokenizer):
    """Tokenizer without an end token."""

    eod = eos = None
    bos = 256


class Served:
    """HTTP server that runs in this process, with methods that send requests to the server."""

    def __init__(self, engine: Engine, loop: EngineLoop, server: ApiServer) -> None:
        self.engine, self.loop, self.server = engine, loop, server
        self.steps, self.may_step = 0, threading.Event()
        self.may_step.set()
        self.address = ("127.0.0.1", server.port)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self.address, timeout=HANG)
        connection.request(method or ("GET" if data is None else "POST"), path, data)
        found = connection.getresponse()
        text = found.read()
        connection.close()
        if found.headers["Content-Type"] == "text/event-stream":
            return found.status, text.decode()
        return found.status, json.loads(text) if text else None

    def raw(self, *parts: bytes, shut: bool = False) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=HANG)
        for part in parts:
            connection.sendall(part)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        return connection

    def status_line(self, *parts: bytes, shut: bool = False) -> bytes:
        with self.raw(*parts, shut=shut) as connection, connection.makefile("rb") as stream:
            return stream.readline()


LIMITS = HttpLimits(body_bytes=20_000, read_seconds=HANG)


@contextmanager
def serving(limits: HttpLimits = LIMITS, rows: int = 4, most_waiting: int = 64, slow: float = 0.0) -> Iterator[Served]:
    config = replace(LLAMA, vocab_size=257, seq_length=LENGTH, init_method_std=0.3)
    runner, tokenizer = StageRunner({0: GPTModel(config, FP64).eval()}), Endless()
    model = LoadedModel(runner, tokenizer, TokenizerConfig(tokenizer_type="ByteTokenizer"), RunConfig())
    engine = model.engine(rows)
    loop = EngineLoop(engine, most_waiting, grace=1.0)
    template: Callable[[], ChatTemplate] = lambda: ChatTemplate(TEMPLATE, {}, "test")  # noqa: E731
    api = OpenAIApi(model, engine, "tiny", Limits(new_tokens=10**10), template)
    with ApiServer(("127.0.0.1", 0), api, loop, limits, lambda line: None) as server:
        served, step = Served(engine, loop, server), engine.step

        def counted() -> list[Any]:
            assert served.may_step.wait(HANG)
            time.sleep(slow)
            served.steps += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield served
        finally:
            served.may_step.set()
            loop.stop()
            thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    torch.set_num_threads(1)
    with serving() as found:
        yield found


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POST = b"POST /v1/completions HTTP/1.1\r\n"


def events(text: str) -> list[Any]:
    *parts, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(part) for part in parts]


def test_completion_returns_text(served: Served) -> None:
    body = {"model": "tiny", "prompt": "né", "max_tokens": 9, "seed": 5, "temperature": 0.8, "top_p": 0.9, "n": 2}
    status, found = served.ask(COMPLETIONS, body | {"logprobs": 2, "echo": True})
    assert status == 200 and found["object"] == "text_completion" and found["model"] == "tiny"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}
    first, second = found["choices"]
    assert first["index"] == 0 and second["index"] == 1 and first["text"] != second["text"]
    assert first["text"].startswith("né") and first["finish_reason"] == "length"
    logprobs = first["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [12] * 4
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    model = served.engine.runner.stages[0]
    request = Request(list("né".encode()), 9, Sampling(0.8, top_p=0.9), seed=5)
    (alone,) = Engine(StageRunner({0: model}), ByteTokenizer().detokenize).run([request])
    assert first["text"] == "né" + alone.text
    assert served.ask(COMPLETIONS, body | {"n": 1})[1]["choices"][0]["text"] == alone.text
    assert served.ask(COMPLETIONS, {"prompt": "né"})[1]["usage"]["completion_tokens"] == 16
    several = served.ask(COMPLETIONS, body | {"prompt": ["a", [98, 99]], "max_tokens": 1})[1]
    assert len(several["choices"]) == 4 and several["usage"]["prompt_tokens"] == 3


def test_streams_join_to_the_answer(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 20, "seed": 3, "n": 3, "logprobs": 0}
    whole = served.ask(COMPLETIONS, body)[1]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(served.ask(COMPLETIONS, streamed)[1])
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for text in whole["choices"]:
        of_text = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == text["index"]]
        assert "".join(each["text"] for each in of_text) == text["text"]
        tokens = [token for each in of_text if each["logprobs"] for token in each["logprobs"]["tokens"]]
        assert tokens == text["logprobs"]["tokens"] and len(of_text) > 5
        assert [each["finish_reason"] for each in of_text if each["finish_reason"]] == ["length"]


def test_chat_completion_returns_text(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    body = {"messages": messages, "max_completion_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 2}
    status, found = served.ask(CHAT, body)
    assert status == 200 and found["object"] == "chat.completion"
    (answer,) = found["choices"]
    assert answer["message"]["role"] == "assistant" and len(answer["logprobs"]["content"]) == 6
    assert len(answer["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert found["usage"]["prompt_tokens"] == len("<user>hi<assistant>")
    same = {"prompt": "<user>hi<assistant>", "max_tokens": 6, "seed": 1}
    assert served.ask(COMPLETIONS, same)[1]["choices"][0]["text"] == answer["message"]["content"]
    chunks = events(served.ask(CHAT, body | {"stream": True})[1])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == answer["message"]["content"]


def test_finish_reasons_are_reported(served: Served) -> None:
    assert (
        served.ask(COMPLETIONS, {"prompt": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")})[0] == 200
    )
    odd = {"top_k": 10**30, "temperature": 1e6, "repetition_penalty": 1e3, "stop_token_ids": [-1, 10**30]}
    assert served.ask(COMPLETIONS, {"prompt": "a"} | odd)[0] == 200
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 10**9}
    free = served.ask(COMPLETIONS, body)[1]
    (found,) = free["choices"]
    assert found["finish_reason"] == "length" and free["usage"]["completion_tokens"] == LENGTH - 2
    assert {choice(0, {}, None, reason)["finish_reason"] for reason in ("eos", "stop")} == {"stop"}
    stop = next(found["text"][i : i + 2] for i in range(3, 60) if "\ufffd" not in found["text"][i : i + 2])
    (cut,) = served.ask(COMPLETIONS, body | {"stop": stop})[1]["choices"]
    assert cut["finish_reason"] == "stop" and cut["text"] == found["text"][: found["text"].index(stop)]
    nothing = served.ask(COMPLETIONS, {"prompt": "", "max_tokens": 0})[1]
    assert nothing["choices"][0]["text"] == "" and nothing["usage"]["completion_tokens"] == 0
    scored = served.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0})[1]
    assert scored["choices"][0]["text"] == "abc" and len(scored["choices"][0]["logprobs"]["tokens"]) == 3
    (alone,) = served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1})[1]["choices"]
    first = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": None, "text_offset": [0]}
    assert alone["text"] == "a" and alone["logprobs"] == first


WRONG: list[tuple[Any, str]] = [
    (b"{", "the body is not JSON"),
    (b'{"prompt": "\\ud800"}', "half a character"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    ({"prompt": "a", "seed": 2**65, "top_k": -2}, "top_k: must be a whole number"),
    ({"prompt": "a" * 64}, "the prompt has 64 tokens, but the model reads at most 64"),
    ({"prompt": [1, -1]}, "tokens must be from 0 to 256"),
    ({"prompt": []}, "prompt: must be a text"),
    ({"prompt": "a", "stop": ""}, "stop: must be a nonempty text or a list of nonempty texts"),
    ({"prompt": "a", "max_tokens": 10**11}, "max_tokens: 100000000000 exceeds the limit of this server"),
    ({"prompt": "a", "max_tokens": True, "n": 0, "top_p": 2}, "; max_tokens: must be a whole number"),
    ({"prompt": ["a"] * 9, "n": 2}, "requests 18 texts"),
    ({"prompt": "a", "temprature": 1}, "did you mean temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature: -1.0 must be 0 or from 1e-06 to 1,000,000"),
    ({"prompt": "a", "temperature": 1e-320}, "temperature: 1e-320 must be 0 or from 1e-06 to 1,000,000"),
    (
        {"prompt": "a", "repetition_penalty": 1e-320},
        "repetition_penalty: 1e-320 must be from 0.001 to 1,000; 1 applies",
    ),
    ({"prompt": "a", "repetition_penalty": 1e308}, "repetition_penalty: 1e+308 must be from 0.001 to 1,000; 1 applies"),
    ({"prompt": "a", "presence_penalty": 1e-320}, "presence_penalty: 1e-320 is not supported"),
    ({"prompt": "a", "temperature": 10**400}, "temperature: is too large"),
    ({"prompt": "a", "presence_penalty": 1}, "presence_penalty: 1 is not supported"),
]


REFUSED = [
    *((COMPLETIONS, body, 400, message) for body, message in WRONG),
    (CHAT, {"messages": []}, 400, "messages must be a list"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0] must have a content"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools: [{}] is not supported"),
    (COMPLETIONS, b"x" * 20_001, 413, "has 20001 bytes; this server reads at most 20000"),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, 404, 'no model \\"gpt-4\\" here; this server has tiny'),
    ("/v1/embeddings", {"input": "a"}, 404, "there is no POST /v1/embeddings"),
    ("/nothing", None, 404, "there is no GET /nothing"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_invalid_requests_get_the_reason(served: Served, path: str, body: Any, status: int, message: str) -> None:
    found = served.ask(path, body)
    assert found[0] == status
    assert set(found[1]["error"]) == {"message", "type", "param", "code"}
    assert message in json.dumps(found[1]["error"]["message"])


def test_other_methods_and_malformed_http_are_refused(served: Served) -> None:
    assert served.ask(COMPLETIONS, {"prompt": "a"}, method="PUT")[0] == 405
    whole = POST + b'Host: a\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{"n":0\r\n1\r\n}\r\n0\r\n\r\n'
    for request in (whole, POST + b"Content-Length: -5\r\n\r\n", b"\x16\x03\x01 what HTTP/9.9\r\n\r\n"):
        assert served.status_line(request).startswith(b"HTTP/1.1 400 ")
    assert served.status_line(POST + b"Host: a\r\nContent-Length: 50\r\n\r\n{", shut=True) == b""
    assert served.ask("/health") == (200, {"status": "ok", "pending": 0})
    assert served.ask("/v1/models")[1]["data"][0]["id"] == "tiny"


def test_fifty_clients_at_once_get_the_same_texts_as_alone(served: Served) -> None:
    bodies = [{"prompt": chr(97 + i % 26) * (1 + i % 7), "seed": i, "max_tokens": 5 + i % 9} for i in range(50)]
    with ThreadPoolExecutor(50) as clients:
        found = list(clients.map(lambda body: served.ask(COMPLETIONS, body), bodies))
    assert [status for status, _ in found] == [200] * 50
    for body, (_, together) in list(zip(bodies, found, strict=True))[::7]:
        assert served.ask(COMPLETIONS, body)[1]["choices"] == together["choices"]


LONG = json.dumps({"prompt": "a", "max_tokens": 60, "n": 4, "stream": True}).encode()


def posted(body: bytes) -> bytes:
    return POST + b"Host: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_rows(stream: bool) -> None:
    body = LONG if stream else LONG.replace(b'"stream": true', b'"stream": false')
    with serving(slow=0.2) as served:
        for shut in (False, True):  # the client first closes the connection, then closes only its sending side
            before = served.steps
            with served.raw(posted(body), shut=shut) as connection:
                if shut:
                    while connection.recv(1 << 16):
                        pass
                else:
                    wait_for(lambda: served.loop.pending > 0)
            wait_for(lambda: served.loop.pending == 0)
            assert served.steps - before < 50, "the text was generated to its end"
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200


def clocked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the server's clock with a simulated clock. Each step of the server loop takes 50 ms, and everything else
    takes no time."""
    monkeypatch.setattr(engine_loops, "time", SimpleNamespace(monotonic=lambda: 0.05 * served.steps))


def test_requests_have_limits_of_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(replace(LIMITS, answer_seconds=0.4, connections=3), rows=1, most_waiting=2) as served:
        clocked(served, monkeypatch)
        status, found = served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 60})
        assert status == 408 and "took more than 0.4 seconds" in found["error"]["message"]
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
        status, found = served.ask(COMPLETIONS, {"prompt": "a", "n": 4})
        assert (
            status == 429 and found["error"]["type"] == "rate_limit_error" and "try later" in found["error"]["message"]
        )
        wait_for(lambda: served.server.open == 0)
        with ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(served.raw())
            assert served.ask("/health")[0] == 429


@pytest.mark.parametrize(
    "begin", [b"GET /health HTTP/1.1\r\n", b"POST /absent HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"]
)
def test_slow_clients_are_disconnected(begin: bytes) -> None:
    with serving(replace(LIMITS, read_seconds=0.3)) as served, served.raw(begin) as connection:
        end = time.monotonic() + 60
        with suppress(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() < end
        wait_for(lambda: served.server.open == 0)


def test_the_time_limit_of_a_head_ends_with_the_head(served: Served) -> None:
    with served.raw() as connection, connection.makefile("rb") as answers:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            wait_for(lambda: [each._late for each in served.server.server.server_state.connections] != [None])
            connection.sendall(b"Host: a\r\n\r\n")
            assert answers.readline().startswith(b"HTTP/1.1 200 ")
            while answers.readline().strip():
                pass
            assert b"ok" in answers.read1()
            assert [each._late for each in served.server.server.server_state.connections] == [None]


def test_unknown_fields_are_cheap(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(jsonl.difflib, "get_close_matches", lambda name, *_: asked.append(name) or [])
    body = {"prompt": "a", "x" * 5000: 1} | {f"unknown{number}": 1 for number in range(500)}
    status, found = served.ask(COMPLETIONS, body)
    said = found["error"]["message"]
    assert status == 400 and len(asked) == 5 and max(map(len, asked)) <= 60
    assert (
        "unknown3: is not a field of this request; 496 more: are not fields of this request" in said and len(said) < 600
    )


def test_late_bodies_are_refused() -> None:
    def answer() -> bytes:
        with (
            served.raw(POST + b"Host: a\r\nContent-Length: 50\r\n\r\n{") as connection,
            connection.makefile("rb") as stream,
        ):
            return stream.read()

    with serving(replace(LIMITS, read_seconds=0.3)) as served:
        with served.raw() as silent:
            assert silent.recv(1) == b"", "a connection that sends nothing is closed"
        # if the head of the request is late too, the answer is empty, and the request is sent again
        found = next(filter(None, (answer() for _ in range(100))), b"")
        assert found.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.3 seconds" in found


@pytest.mark.parametrize("end", ["length", "cancelled"])
def test_a_finished_text_is_no_longer_pending(end: str) -> None:
    told: list[tuple[str, int]] = []

    def tell(progress: Progress) -> None:
        if progress.finish_reason is not None:
            told.append((progress.finish_reason, served.loop.pending))

    with serving() as served:
        served.may_step.clear()
        job = served.loop.submit([Request([97], 3)], HANG, tell)
        if end == "cancelled":
            served.loop.cancel(job)
        served.may_step.set()
        wait_for(lambda: bool(told))
    assert told == [(end, 0)]


def test_non_finite_logits_are_a_server_error() -> None:
    with serving() as served:
        served.engine.runner.stages[0].embedding.word_embeddings.weight.data[ord("!")] = torch.nan
        status, found = served.ask(COMPLETIONS, {"prompt": "a!", "max_tokens": 5})
        assert status == 500 and "logits after token 2 are not finite" in found["error"]["message"]
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "temperature": 0})[0] == 200


def test_waiting_clients_are_told_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served, ThreadPoolExecutor(2) as clients:
        clocked(served, monkeypatch)
        served.may_step.clear()
        short = clients.submit(served.ask, COMPLETIONS, {"prompt": "a", "max_tokens": 3})
        long = clients.submit(served.ask, COMPLETIONS, {"prompt": "a", "max_tokens": 60})
        wait_for(lambda: served.loop.pending == 2)
        served.loop.stop()
        served.may_step.set()
        status, found = long.result(HANG)
        assert short.result(HANG)[0] == 200
        assert status == 503 and "the server was stopped" in found["error"]["message"]
        assert served.ask("/health")[0] == 503
        assert served.ask(COMPLETIONS, {"prompt": "a"})[0] == 503


def test_the_openai_client_works(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url="http://{}:{}/v1".format(*served.address), api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="ab", max_tokens=8, seed=3, logprobs=1)
    assert whole.usage.completion_tokens == 8 and len(whole.choices[0].logprobs.tokens) == 8
    parts = client.completions.create(model="tiny", prompt="ab", max_tokens=8, seed=3, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    said = [{"role": "user", "content": "hi"}]
    more = {"max_tokens": 5, "seed": 1, "stop": ["zzz"], "logprobs": True, "top_logprobs": 1}
    answer = client.chat.completions.create(model="tiny", messages=said, **more)
    assert len(answer.choices[0].logprobs.content) == 5
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="tiny", messages=said, **more, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert last.usage == answer.usage
    with pytest.raises(openai.BadRequestError, match="reads at most 64"):
        client.completions.create(model="tiny", prompt="a" * 70)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="other", prompt="a")
