"""Generate text with a trained model, in one process, from a checkpoint saved at any layout.

    python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def read(self):" "class Lock:"
    python tools/generate_text.py --load runs/quickstart/checkpoints --temperature 0.8 --top-p 0.9 < prompts.txt

Without --prompt, each line of standard input is a prompt. Decoding is greedy unless --temperature, --top-k or --top-p
requests sampling. The tokenizer defaults to that of the training run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

import torch

from megatron.core.config.data import TokenizerConfig
from megatron.core.models.gpt.generation import Sampling, generate
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers import Tokenizer
from megatron.training.checkpointing import load_model_for_inference

from .common import TOKENIZER_FIELDS, add_config_flags, add_extension_flag, config_of, run_tool


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sampling = sampling_of(args)
    tokenizer_config = config_of(TokenizerConfig, args) if args.tokenizer_type else None
    model, tokenizer, _ = load_model_for_inference(args.load, args.device, tokenizer_config)
    shown = bad = 0
    for prompts in batches_of_prompts(args):
        prompts, problems = readable(model, tokenizer, prompts)
        bad += len(problems)
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        for text in continuations(model, tokenizer, prompts, sampling, args, shown):
            if shown and len(args.prompt) > 1:
                print("-" * 40)
            print(text, flush=True)
            shown += 1
    return 2 if bad else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_extension_flag(parser, argv)
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints, or one checkpoint in it")
    parser.add_argument("--prompt", nargs="+", action="extend", default=[], help="texts to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="maximum number of new tokens (default: 64)")
    parser.add_argument("--temperature", type=float, help="divides the logits; 0 is greedy (default: greedy)")
    parser.add_argument("--top-k", type=int, help="sample from the k most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, help="sample from the smallest set of tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of the sampling (default: 1234)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts per batch (default: 8)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda, or cpu"
    )
    add_config_flags(parser, "tokenizer, where its files are not where they were in training", *TOKENIZER_FIELDS)
    args = parser.parse_args(argv)
    problems = [
        f"{flag} {value} must be at least 1"
        for flag, value in (("--max-new-tokens", args.max_new_tokens), ("--batch-size", args.batch_size))
        if value < 1
    ]
    files = [
        f"--{name.replace('_', '-')}" for name in TOKENIZER_FIELDS if name != "tokenizer_type" and getattr(args, name)
    ]
    if files and not args.tokenizer_type:
        problems.append(f"{', '.join(files)} needs --tokenizer-type beside it")
    if problems:
        raise ValueError("\n".join(problems))
    return args


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Greedy by default; --top-k or --top-p alone samples at temperature 1."""
    limited = args.top_k is not None or args.top_p is not None
    default = 1.0 if limited else 0.0
    return Sampling(default if args.temperature is None else args.temperature, args.top_k, args.top_p)


def batches_of_prompts(args: argparse.Namespace) -> Iterator[list[str]]:
    """--prompt or standard input in batches; a terminal line by line, so that a person can write to the model."""
    size = args.batch_size
    if not args.prompt and sys.stdin.isatty():
        print("a prompt per line, Ctrl-D to end", file=sys.stderr)
        size = 1
    lines = (line.rstrip("\n") for line in sys.stdin if line.strip())
    prompts = iter(args.prompt) if args.prompt else lines
    while batch := list(islice(prompts, size)):
        yield batch


def readable(model: GPTModel, tokenizer: Tokenizer, prompts: list[str]) -> tuple[list[str], list[str]]:
    """The prompts that leave room for a token, and what is wrong with the others."""
    longest, kept, problems = model.config.max_positions, [], []
    for prompt in prompts:
        length = len(tokenizer.tokenize(prompt))
        if length < longest:
            kept.append(prompt)
        else:
            problems.append(
                f"prompt {prompt[:40]!r}...: has {length} tokens, and the model reads at most {longest} "
                f"(--max-position-embeddings); shorten it to {longest - 1} or fewer"
            )
    return kept, problems


def continuations(
    model: GPTModel, tokenizer: Tokenizer, prompts: list[str], sampling: Sampling, args: argparse.Namespace, first: int
) -> list[str]:
    """Each prompt with its continuation. An empty prompt begins a document."""
    start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
    ids = [tokenizer.tokenize(prompt) or ([] if start is None else [start]) for prompt in prompts]
    stop = {token for token in (tokenizer.eod, tokenizer.eos) if token is not None}
    found = generate(model, ids, args.max_new_tokens, sampling, seed=args.seed, first=first, stop=stop)
    texts = []
    for prompt, prompt_ids, new in zip(prompts, ids, found, strict=True):
        # Decoded together, as the first new token may complete a word or a character; the prompt stands as written.
        before, whole = tokenizer.detokenize(prompt_ids), tokenizer.detokenize([*prompt_ids, *new])
        texts.append(prompt + whole[len(before) :] if prompt and whole.startswith(before) else whole)
    return texts


if __name__ == "__main__":
    run_tool(main)
