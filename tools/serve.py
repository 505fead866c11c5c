"""Serve a trained model over HTTP with the OpenAI API, for experiments, from a checkpoint saved under any layout.

    python tools/serve.py --load runs/quickstart/checkpoints --port 8000
    torchrun --nproc-per-node 4 tools/serve.py --load runs/large/checkpoints \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def read(self):", "max_tokens": 32}'

The server answers requests to /v1/completions, /v1/chat/completions, /v1/models and /health. The server generates the
texts of several requests in one batch. The text of a request does not depend on other requests. SIGTERM and SIGINT end
the server. docs/generation.md describes the fields and the limits. To serve many users, convert the model to a Hugging
Face folder and use a program designed for serving, such as vLLM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.file_storage import resolved
from megatron.extensions.use.inference.chat_template import find_chat_template
from megatron.extensions.use.inference.generation import Engine
from megatron.extensions.use.inference.model import LoadedModel
from megatron.extensions.use.inference.openai_api import Limits, OpenAIApi
from megatron.extensions.use.inference.serving import EngineLoop
from megatron.training.reliability.launch import Launch

from .common import model_flag_problems, model_parser, open_model, refuse, run_tool, too_small

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    args, launch = parse(argv), Launch.from_environment()
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise ValueError("serving needs FastAPI and uvicorn: pip install 'paritrain[serve]'")
    with ExitStack() as stack:
        model = open_model(args, launch, stack)
        if not model.leads:
            for number in SIGNALS:  # ignored here, because the first rank ends the other ranks
                signal.signal(number, signal.SIG_IGN)
            try:
                model.runner.follow()
            except RuntimeError as error:
                give_up(launch, error)
            return 0
        engine = model.engine(args.batch_size)
        try:
            stack.callback(engine.stop)
            serve(args, model, engine)
        except RuntimeError as error:
            give_up(launch, error)
    return 0


def serve(args: argparse.Namespace, model: LoadedModel, engine: Engine) -> None:
    """Serve until a signal arrives. Raises RuntimeError if another rank has exited, and OSError if the port is
    unavailable."""
    from megatron.extensions.use.inference.http_server import ApiServer, HttpLimits

    loop = EngineLoop(engine, args.max_waiting)
    limits = Limits(new_tokens=args.max_tokens_limit)
    template = lru_cache(partial(find_chat_template, model.tokenizer_config, args.chat_template))
    name = args.served_model_name or resolved(args.load).name
    api = OpenAIApi(model, engine, name, limits, template)
    http = HttpLimits(args.max_body_bytes, answer_seconds=args.request_timeout, connections=args.max_connections)
    log = partial(print, file=sys.stderr, flush=True) if args.log_requests else lambda line: None

    def on_signal(number: int, frame: FrameType | None) -> None:
        if loop.stopping.is_set():  # on a second signal, exit immediately
            os._exit(128 + number)
        loop.stop()

    with ApiServer((args.host, args.port), api, loop, http, log) as server:
        for number in SIGNALS:
            signal.signal(number, on_signal)
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"serving {name} at http://{host}:{server.port}/v1", flush=True)
        loop.run()


def give_up(launch: Launch, error: Exception) -> None:
    """Exit this rank, because it can no longer reach the other ranks."""
    first = str(error).strip().partition("\n")[0]
    what = (
        f"error: rank {launch.rank} of {launch.world_size}: another rank has ended, or this one failed; the server ends"
    )
    print(f"{what} ({first})", file=sys.stderr, flush=True)
    os._exit(1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = model_parser(__doc__, argv)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, help="port; 0 selects a free port (default: 8000)")
    add("--served-model-name", metavar="NAME", help="name of the model (default: the name of its folder)")
    add(
        "--max-waiting", type=int, default=64, help="texts that may wait; further requests get status 429 (default: 64)"
    )
    add("--max-tokens-limit", type=int, default=4096, help="maximum number of new tokens per text (default: 4096)")
    add("--max-body-bytes", type=int, default=4 * 2**20, help="largest request (default: 4 MiB)")
    add("--max-connections", type=int, default=128, help="maximum number of connections at once (default: 128)")
    add("--request-timeout", type=float, default=600.0, help="time limit for each answer in seconds (default: 600)")
    add("--log-requests", action="store_true", help="print one line per request to standard error")
    args = parser.parse_args(argv)
    problems = too_small(
        args, batch_size=1, max_waiting=0, max_tokens_limit=1, max_body_bytes=1, max_connections=1, port=0
    )
    if args.request_timeout <= 0:
        problems.append(f"--request-timeout {args.request_timeout:g} must be above 0 seconds")
    if args.port > 65535:
        problems.append(f"--port {args.port} must be at most 65535")
    problems += model_flag_problems(args)
    refuse(problems)
    return args


if __name__ == "__main__":
    run_tool(main)
