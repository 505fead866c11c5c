"""Generate text with a trained model, from a checkpoint saved under any layout.

    python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def read(self):" "class Lock:"
    python tools/generate_text.py --load runs/quickstart/checkpoints --temperature 0.8 --top-p 0.9 < prompts.txt
    python tools/generate_text.py --load runs/quickstart/checkpoints --jsonl requests.jsonl --output texts.jsonl
    python tools/generate_text.py --load runs/instruct/checkpoints --chat
    torchrun --nproc-per-node 4 tools/generate_text.py --load runs/large/checkpoints --jsonl requests.jsonl \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Without --prompt, --jsonl or --chat, each line of standard input is a prompt. Decoding is greedy unless --temperature,
--top-k, --top-p or --min-p requests sampling. By default, the tool uses the tokenizer of the training run. For a single
prompt, text is printed as it is generated. docs/generation.md describes the fields of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.use.inference.chat_template import chat, find_chat_template, pieces
from megatron.extensions.use.inference.generation import Engine, Generation, Request, Sampling, eos_ids
from megatron.extensions.use.inference.generation.engine import prompt_seed
from megatron.extensions.use.inference.jsonl import answers, read_lines
from megatron.extensions.use.inference.model import LoadedModel
from megatron.training.config.problem import any_text
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.visible_text import exact

from .common import model_flag_problems, model_parser, open_model, refuse, run_tool, too_small


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sampling, launch = sampling_of(args), Launch.from_environment()
    with ExitStack() as stack:
        model = open_model(args, launch, stack)
        if not model.leads:
            model.runner.follow()
            return 0
        engine = model.engine(args.batch_size)
        stack.callback(engine.stop)
        request = Request(
            [0],
            args.max_new_tokens,
            sampling,
            args.seed,
            tuple(args.stop),
            frozenset(args.stop_token_ids),
            eos_ids(model.tokenizer),
            args.logprobs,
        )
        if args.chat:
            return run_chat(args, model, engine, request)
        return run_jsonl(args, model, engine, request) if args.jsonl else run_prompts(args, model, engine, request)


def run_prompts(args: argparse.Namespace, model: LoadedModel, engine: Engine, defaults: Request) -> int:
    """Print each prompt with its continuation; the continuation of a single prompt is printed as it is generated."""
    shown, bad = 0, 0
    typed = not args.prompt and sys.stdin.isatty()
    if typed:
        print("one prompt per line, Ctrl-D to end", file=sys.stderr)
    if typed or len(args.prompt) == 1:
        for number, prompt in enumerate(prompts_of(args)):
            generation = engine.submit(request_of(model, defaults, prompt, number))
            if generation.error is None:
                print(prompt, end="", file=exact(sys.stdout), flush=True)
            for piece in pieces(engine, generation):
                print(piece, end="", file=exact(sys.stdout), flush=True)
            bad += reported(prompt, generation)
            if generation.error is None:
                print(flush=True)
        return 2 if bad else 0
    kept: deque[str] = deque()

    def requests() -> Iterator[Request]:
        for number, prompt in enumerate(prompts_of(args)):
            kept.append(prompt)
            yield request_of(model, defaults, prompt, number)

    for generation in engine.run(requests()):
        prompt = kept.popleft()
        if reported(prompt, generation):
            bad += 1
            continue
        if shown and len(args.prompt) > 1:
            print("-" * 40)
        print(prompt + generation.text, file=exact(sys.stdout), flush=True)
        shown += 1
    return 2 if bad else 0


def prompts_of(args: argparse.Namespace) -> Iterator[str]:
    """Return the prompts of --prompt. If the flag is not given, return the lines of standard input that are not
    empty."""
    return iter(args.prompt) if args.prompt else (line.rstrip("\n") for line in sys.stdin if line.strip())


def request_of(model: LoadedModel, defaults: Request, prompt: str, number: int) -> Request:
    return replace(defaults, prompt=model.tokenize(prompt), seed=prompt_seed(defaults.seed, number))


def reported(prompt: str, generation: Generation) -> bool:
    """Print the error if generation failed for a prompt. Return True if generation failed."""
    if generation.error is not None:
        print(f"error: prompt {prompt[:40]!r}...: {generation.error}", file=sys.stderr)
    return generation.error is not None


def run_jsonl(args: argparse.Namespace, model: LoadedModel, engine: Engine, defaults: Request) -> int:
    """Generate a text for each request in the JSON lines, and write the answers in the order of the requests."""
    bad = 0
    with ExitStack() as stack:
        lines = sys.stdin.buffer if args.jsonl == "-" else stack.enter_context(open(args.jsonl, "rb"))
        out: IO[str] = (
            stack.enter_context(open(args.output, "w", encoding="utf-8")) if args.output else exact(sys.stdout)
        )
        template = lru_cache(partial(find_chat_template, model.tokenizer_config, args.chat_template))
        requests = read_lines(lines, model, defaults, lambda messages: template()(messages))
        for answer in answers(requests, engine, model.tokenizer, args.token_ids):
            bad += "error" in answer
            print(json.dumps(answer, ensure_ascii=False), file=out, flush=True)
    if bad:
        print(f"error: {bad} answers contain an error instead of a text", file=sys.stderr)
    return 2 if bad else 0


def run_chat(args: argparse.Namespace, model: LoadedModel, engine: Engine, defaults: Request) -> int:
    """Run a conversation with the model. The user's messages are typed on the terminal, or are the lines of standard
    input."""
    template = find_chat_template(model.tokenizer_config, args.chat_template)
    typed = sys.stdin.isatty()
    if typed:
        print("Ctrl-D to end", file=sys.stderr)

    def ask() -> str | None:
        if typed:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def say(piece: str) -> None:
        print(piece, end="", file=exact(sys.stdout), flush=True)

    chat(model, engine, template, defaults, args.system, ask, say)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = model_parser(__doc__, argv)
    add = parser.add_argument
    add("--prompt", type=any_text, nargs="+", action="extend", default=[], help="texts to continue")
    add("--jsonl", metavar="FILE", help="requests, one JSON object per line; - for standard input")
    add("--output", type=Path, metavar="FILE", help="file for the answers to --jsonl (default: screen)")
    add("--chat", action="store_true", help="talk to the model with its tokenizer's chat template")
    add("--system", type=any_text, metavar="TEXT", help="system message of --chat")
    add("--max-new-tokens", type=int, default=64, help="maximum number of new tokens (default: 64)")
    add("--temperature", type=float, help="divides the logits; 0 is greedy (default: greedy)")
    add("--top-k", type=int, help="sample only from the k most likely tokens")
    add("--top-p", type=float, help="sample from the most likely tokens that together have this probability")
    add(
        "--min-p",
        type=float,
        help="sample from tokens with at least this fraction of the most likely token's probability",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="divides the logits of tokens that the text already contains (default: 1, no penalty)",
    )
    add("--stop", type=any_text, nargs="+", action="extend", default=[], metavar="TEXT", help="texts to stop before")
    add(
        "--stop-token-ids", nargs="+", action="extend", default=[], type=int, metavar="ID", help="tokens to stop before"
    )
    add("--logprobs", type=int, metavar="N", help="with --jsonl: return log-probabilities and N alternatives")
    add("--token-ids", action="store_true", help="with --jsonl: return token ids of prompts and texts")
    add("--seed", type=int, default=1234, help="sampling seed (default: 1234)")
    args = parser.parse_args(argv)
    problems = too_small(args, max_new_tokens=1, batch_size=1)
    ways = [
        flag for flag, given in (("--prompt", args.prompt), ("--jsonl", args.jsonl), ("--chat", args.chat)) if given
    ]
    if len(ways) > 1:
        problems.append(f"{' and '.join(ways)} cannot be combined: keep one of them")
    needs = [("--output", args.output), ("--logprobs", args.logprobs is not None), ("--token-ids", args.token_ids)]
    problems += [f"{flag} needs --jsonl beside it" for flag, given in needs if given and not args.jsonl]
    files = [Path(path) for path in (args.jsonl, args.output) if path and Path(path).exists()]
    if len(files) == 2 and files[0].samefile(files[1]):
        problems.append(f"--output {args.output} is the file of --jsonl: choose another one")
    if args.system is not None and not args.chat:
        problems.append("--system requires --chat; in JSON lines, give a message with the role system")
    problems += model_flag_problems(args)
    refuse(problems)
    return args


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling parameters. Decoding is greedy by default. If --top-k, --top-p or --min-p is set without
    --temperature, the temperature is 1."""
    limited = args.top_k is not None or args.top_p is not None or args.min_p is not None
    default = 1.0 if limited else 0.0
    temperature = default if args.temperature is None else args.temperature
    return Sampling(temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)


if __name__ == "__main__":
    run_tool(main)
