"""HTTP server with the OpenAI API, for trying out a model. The server uses FastAPI and uvicorn. For many users, export
the model and use a production server.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.extensions.use.inference.jsonl import parsed
from megatron.extensions.use.inference.openai_api import ApiError, Call, OpenAIApi
from megatron.extensions.use.inference.serving import Busy, EngineLoop, Job, Progress

PATHS = "GET /health, GET /v1/models, POST /v1/completions and POST /v1/chat/completions"


@dataclass(frozen=True)
class HttpLimits:
    """Limits for connections."""

    body_bytes: int = 4 * 2**20
    read_seconds: float = 20.0
    """Time limit in seconds for receiving the body of a request. The same limit applies to the time for which a
    connection may be idle."""

    answer_seconds: float = 600.0
    connections: int = 128


class Connection(H11Protocol):
    """HTTP connection that is closed if the head of the next request does not arrive within a time limit. This class is
    needed because uvicorn limits only the time between an answer and the first byte of the next request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # `Any`, because asyncio and uvicorn declare different types
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._late is None and self._idle:
            self._await_head()
        super().data_received(data)
        if not self._idle:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        """True if the connection has no request that the server is still answering."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._late = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class ApiServer:
    """HTTP server that runs in a separate thread and submits API requests to an engine loop. Raises OSError if the
    server cannot listen."""

    def __init__(
        self, address: tuple[str, int], api: OpenAIApi, loop: EngineLoop, limits: HttpLimits, log: Callable[[str], None]
    ) -> None:
        self.api = api
        self.loop = loop
        self.limits = limits
        self.log = log
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.create_server(address, family=family, backlog=128)
        config = uvicorn.Config(
            self,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=limits.read_seconds,  # type: ignore[arg-type]
            timeout_graceful_shutdown=1,
        )
        self.app, self.server = self._routes(), uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), name="http", daemon=True)

    def __enter__(self) -> ApiServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down the server. Clients whose requests are still waiting have one second to receive a response. The
        response says whether the server was stopped or has failed."""
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    @property
    def open(self) -> int:
        """Number of open connections."""
        return len(self.server.server_state.connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse requests beyond the connection limit, and log all other requests."""

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.log(f"{scope['client'][0]} {scope['method']} {scope['path']} {message['status']}")
            await send(message)

        if self.open > self.limits.connections:
            error = ApiError(429, f"more than {self.limits.connections} connections; try later")
            await refusal(error, close=True)(scope, receive, logged)
        else:
            await self.app(scope, receive, logged)

    def _routes(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/health", self._health, response_model=None)
        app.add_api_route("/v1/models", self.api.models, response_model=None)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self._complete, methods=["POST"], response_model=None)

        @app.exception_handler(ApiError)
        async def refuse(request: Request, error: ApiError) -> Response:
            return refusal(error, close=error.status in (408, 413))

        @app.exception_handler(HTTPException)
        async def unknown(request: Request, error: HTTPException) -> Response:
            what = f"there is no {request.method} {request.url.path[:100]}; there are {PATHS}"
            return refusal(ApiError(error.status_code, what))

        return app

    async def _health(self) -> dict[str, object]:
        if self.loop.stopping.is_set():
            raise ApiError(503, "the server is shutting down")
        return {"status": "ok", "pending": self.loop.pending}

    async def _complete(self, request: Request) -> Response:
        try:
            values = parsed(await self._body(request))
        except ValueError as error:
            raise ApiError(400, f"the body {error}") from None
        except ClientDisconnect:
            # The client has disconnected, so it does not read this response.
            return Response(status_code=400)
        events, here = asyncio.Queue[Progress](), asyncio.get_running_loop()

        def tell(progress: Progress) -> None:
            # If the server's event loop has already ended, the progress is dropped.
            with suppress(RuntimeError):
                here.call_soon_threadsafe(events.put_nowait, progress)

        try:
            call = await run_in_threadpool(self.api.call, values, "chat" in request.url.path)
            job = self.loop.submit(call.requests, self.limits.answer_seconds, tell)
        except Busy as error:
            raise ApiError(503 if self.loop.stopping.is_set() else 429, str(error)) from None
        except ApiError:
            raise
        except Exception as error:
            # The exception indicates a bug, which is logged and reported to the client.
            self.log("".join(traceback.format_exception(error)))
            raise ApiError(500, f"{type(error).__name__}: {error}") from None
        progress = self._progress(request, call, job, events)
        try:
            first = await anext(progress)
            if call.stream:
                stream = self._stream(call, job, first, progress)
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "Connection": "close"}
                return StreamingResponse(stream, headers=headers)
            async for _ in progress:
                pass
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(self.api.answer(call, job.generations))

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request. Raises ApiError if the body is too long or arrives too late. Raises
        ClientDisconnect if the client disconnects before the body is complete."""
        size = int(request.headers.get("Content-Length", 0))
        most = self.limits.body_bytes
        parts = list[bytes]()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                stream = request.stream()
                while size <= most and (part := await anext(stream, None)) is not None:
                    parts.append(part)
                    size = max(size, sum(map(len, parts)))
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.read_seconds:g} seconds") from None
        if size > most:
            raise ApiError(413, f"the body has {size} bytes; this server reads at most {most}")
        return b"".join(parts)

    async def _progress(
        self, request: Request, call: Call, job: Job, events: asyncio.Queue[Progress]
    ) -> AsyncIterator[Progress]:
        """Yield the progress of the generations until all of them are complete. Raises ApiError if a generation fails,
        and ClientDisconnect if the client disconnects."""
        gone, open_texts = asyncio.ensure_future(request.receive()), len(call.requests)
        try:
            while open_texts:
                found = asyncio.ensure_future(events.get())
                await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    found.cancel()
                    raise ClientDisconnect
                event = found.result()
                if event.finish_reason == "timeout":
                    seconds = self.limits.answer_seconds
                    raise ApiError(408, f"the answer took more than {seconds:g} seconds; ask for fewer tokens")
                if event.finish_reason == "error":
                    why = event.error or "the text failed"
                    raise ApiError(503 if "server" in why else 500, why)
                open_texts -= event.finish_reason is not None
                yield event
        finally:
            gone.cancel()
            self.loop.cancel(job)

    async def _stream(self, call: Call, job: Job, event: Progress, rest: AsyncIterator[Progress]) -> AsyncIterator[str]:
        """Yield server-sent events. If an error occurs after the first piece of text was sent, the error is sent as an
        event."""
        count = len(call.requests)
        shown, counted = [0] * count, [0] * count
        try:
            while True:
                index, found = event.choice, job.generations[event.choice]
                piece, first = event.text[shown[index] :], counted[index] == 0
                tokens = found.logprobs[counted[index] : event.tokens] if found.request.logprobs is not None else None
                shown[index], counted[index] = len(event.text), event.tokens
                if first and call.echo:
                    piece = call.prompts[index] + piece
                if piece or tokens or event.finish_reason or first:
                    yield sent(self.api.chunk(call, index, piece, tokens, event.finish_reason, first))
                event = await anext(rest)
        except StopAsyncIteration:
            if call.include_usage:
                yield sent(self.api.last_chunk(call, counted))
        except ApiError as error:
            yield sent(error.body())
        except ClientDisconnect:
            return
        yield "data: [DONE]\n\n"


def sent(body: dict[str, object]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def refusal(error: ApiError, close: bool = False) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body(), error.status, headers | ({"Connection": "close"} if close else {}))
