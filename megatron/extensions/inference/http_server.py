"""An HTTP server with the OpenAI API over a model, for trying it.

It is Python's own `http.server`, a thread for each connection: the model is the bottleneck, and there is nothing to
install. For many users, export the model and use a server made for that.
"""

from __future__ import annotations

import json
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.extensions.inference.fields import parsed
from megatron.extensions.inference.openai_api import ApiError, Call, OpenAIApi
from megatron.extensions.inference.serving import Busy, EngineLoop, Job, Progress

POLL = 0.25
"""Seconds between two looks whether a client is still there."""


@dataclass(frozen=True)
class HttpLimits:
    """What a connection may take."""

    body_bytes: int = 4 * 2**20
    read_seconds: float = 20.0
    """Until a request has come whole; also how long a connection may be idle."""

    answer_seconds: float = 600.0
    connections: int = 128


class ApiServer(ThreadingHTTPServer):
    """Serves an API from the engine of a loop."""

    daemon_threads, block_on_close, request_queue_size = True, False, 128

    def __init__(
        self, address: tuple[str, int], api: OpenAIApi, loop: EngineLoop, limits: HttpLimits, log: Callable[[str], None]
    ) -> None:
        self.api, self.loop, self.limits, self.log = api, loop, limits, log
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.open = 0
        self._lock = threading.Lock()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self.open += 1
            full = self.open > self.limits.connections
        if full:
            body = json.dumps(
                ApiError(429, f"more than {self.limits.connections} connections; try later").body()
            ).encode()
            head = (
                f"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            )
            with suppress(OSError):
                request.settimeout(1)
                request.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self.open -= 1
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no error of the server."""


class Handler(BaseHTTPRequestHandler):
    protocol_version, server_version = "HTTP/1.1", "megatron"
    server: ApiServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.limits.read_seconds)

    def log_message(self, format: str, *args: Any) -> None:
        self.server.log(f"{self.client_address[0]} {format % args}")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What `http.server` finds wrong with a request, of whatever version."""
        self.request_version = self.protocol_version
        self._refuse(ApiError(int(code), message or self.responses.get(code, ("error",))[0]), close=True)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            if self.server.loop.stopping.is_set():
                self._refuse(ApiError(503, "the server is shutting down"), close=True)
                return
            self._send(200, {"status": "ok", "pending": self.server.loop.pending})
        elif path == "/v1/models":
            self._send(200, self.server.api.models())
        else:
            self._refuse(self._unknown(path))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        chat = path == "/v1/chat/completions"
        try:
            body = self._body()
            if not chat and path != "/v1/completions":
                raise self._unknown(path)
            try:
                values = parsed(body)
            except ValueError as error:
                raise ApiError(400, f"the body {error}") from None
            call = self.server.api.call(values, chat)
            try:
                job = self.server.loop.submit(call.requests, self.server.limits.answer_seconds)
            except Busy as error:
                raise ApiError(503 if self.server.loop.stopping.is_set() else 429, str(error)) from None
        except ApiError as error:
            self._refuse(error, close=error.status in (408, 411, 413))
            return
        except OSError:  # the client has gone
            self.close_connection = True
            return
        except Exception as error:  # a mistake of this program: the client is told, and the log
            self.log_message("%s", "".join(traceback.format_exception(error)))
            self._refuse(ApiError(500, f"{type(error).__name__}: {error}"), close=True)
            return
        try:
            self._stream(call, job) if call.stream else self._answer(call, job)
        except OSError:  # the client has gone
            self.close_connection = True
        finally:
            self.server.loop.cancel(job)

    def _unknown(self, path: str) -> ApiError:
        known = "GET /health, GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
        return ApiError(404, f"there is no {self.command} {path[:100]}; there are {known}")

    def _body(self) -> bytes:
        text, limits = self.headers.get("Content-Length"), self.server.limits
        if text is None or not text.isascii() or not text.isdigit() or "Transfer-Encoding" in self.headers:
            raise ApiError(411, "the request needs a Content-Length, and no Transfer-Encoding")
        length = int(text[:20])
        if length > limits.body_bytes:
            raise ApiError(413, f"the body has {length} bytes; this server reads at most {limits.body_bytes}")
        parts, until = [], time.monotonic() + limits.read_seconds
        late = ApiError(408, f"the body did not come within {limits.read_seconds:g} seconds")
        while length:
            left = until - time.monotonic()
            if left <= 0:
                raise late
            self.connection.settimeout(left)
            try:
                part = self.rfile.read1(length)
            except TimeoutError:
                raise late from None
            if not part:
                raise ApiError(400, f"the connection ended {length} bytes before the end of the body")
            parts.append(part)
            length -= len(part)
        self.connection.settimeout(limits.read_seconds)
        return b"".join(parts)

    def _events(self, call: Call, job: Job) -> Iterator[Progress]:
        """Until every text has ended. Raises ConnectionError when the client closes the connection."""
        open_texts = len(call.requests)
        while open_texts:
            if self._gone():
                raise ConnectionError
            try:
                event = job.events.get(timeout=POLL)
            except queue.Empty:
                continue
            open_texts -= event.finish_reason is not None
            yield event

    def _gone(self) -> bool:
        """Whether the client has closed its side. One that only half-closes counts as gone, as with most servers."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def _answer(self, call: Call, job: Job) -> None:
        for event in self._events(call, job):
            if error := failure(event, self.server.limits):
                self._refuse(error)
                return
        self._send(200, self.server.api.answer(call, job.generations))

    def _stream(self, call: Call, job: Job) -> None:
        """Server-sent events. An error after the first piece is an event too."""
        api, count = self.server.api, len(call.requests)
        shown, counted, begun = [0] * count, [0] * count, False
        for event in self._events(call, job):
            if error := failure(event, self.server.limits):
                if not begun:
                    self._refuse(error)
                    return
                self._event(error.body())
                break
            if not begun:
                self._begin_stream()
                begun = True
            index, found = event.choice, job.generations[event.choice]
            piece, first = event.text[shown[index] :], counted[index] == 0
            tokens = found.logprobs[counted[index] : event.tokens] if found.request.logprobs is not None else None
            shown[index], counted[index] = len(event.text), event.tokens
            if first and call.echo:
                piece = call.prompts[index] + piece
            if piece or tokens or event.finish_reason or first:
                self._event(api.chunk(call, index, piece, tokens, event.finish_reason, first))
        else:
            if call.include_usage:
                self._event(api.last_chunk(call, counted))
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _begin_stream(self) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def _refuse(self, error: ApiError, close: bool = False) -> None:
        self._send(error.status, error.body(), close)

    def _send(self, status: int, body: dict[str, Any], close: bool = False) -> None:
        data = json.dumps(body).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status in (429, 503):
                self.send_header("Retry-After", "1")
            if close:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.wfile.write(data)


def failure(event: Progress, limits: HttpLimits) -> ApiError | None:
    """The error that a text ended with, if it did."""
    if event.finish_reason == "timeout":
        return ApiError(408, f"the answer took more than {limits.answer_seconds:g} seconds; ask for fewer tokens")
    if event.finish_reason == "error":
        return ApiError(503 if event.error and "server" in event.error else 500, event.error or "the text failed")
    return None
