"""A bug that the loss does not show and the tasks do: one tensor-parallel rank's embeddings are scaled from some step.

    python -m tests.extensions.evaluation.planted_bug                 # three runs of 280 steps at TP 2, and a table
    python -m tests.extensions.evaluation.planted_bug --factor 0.0    # another bug

The vocabulary is cut in two: rank 0 has the letters that nearly all text consists of, rank 1 rare ones. The text is
prose, in which one line of eight says which of four words a rare letter stands for. A task asks for that word. The
three runs are one as it should be, one with another seed, which shows how far losses differ by chance, and one with the
bug. The task shows it when its score is further from the sound run's than three standard errors, the loss when it is
further than three times what the two seeds differ by at this evaluation or the ones beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.extensions.evaluation.in_loop import EvalTasks, generation_of, scorer_of
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.progress import Interval
from megatron.training.train_step import train_step

WORDS = "stone river cloud ember".split()
LETTERS = [chr(code) for code in range(0xE4, 0xF0)]
"""Each is a byte of rank 1 behind one of rank 0's, C3."""

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --tokenizer-type ByteTokenizer --cpu "
    "--vocab-size 257 --make-vocab-size-divisible-by 8 --lr 4e-3 --min-lr 4e-4 --global-batch-size 32 "
    "--micro-batch-size 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --eval-iters 0 --num-workers 0 --tp 2 --untie-embeddings-and-output-weights "
)

Point = tuple[int, float, dict[str, tuple[float, float]]]
"""(iteration, mean loss since the last one, task -> (score, standard error))."""


def write_data(folder: Path) -> None:
    """Text, and two tasks: what rare letters stand for, and how prose goes on."""
    chance = random.Random(0)
    names = ["".join(chance.choice("abcdefghijklmnoprstuvw") for _ in range(chance.randint(2, 6))) for _ in range(60)]

    def prose() -> str:
        return " ".join(chance.choice(names[: chance.randint(4, 60)]) for _ in range(10)) + "."

    def fact(number: int) -> str:
        return f"{LETTERS[number]} {WORDS[number * 7 % 4]}."

    lines = [prose() if place % 8 else fact(chance.randrange(len(LETTERS))) for place in range(40000)]
    texts = ["\n".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    facts = [
        {"before": prose()[-30:], "letter": letter, "label": number * 7 % 4}
        for number, letter in enumerate(LETTERS)
        for _ in range(5)
    ]
    (folder / "facts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in facts))
    (folder / "prose.jsonl").write_text("".join(json.dumps({"text": prose()}) + "\n" for _ in range(40)))
    common = {"dataset_path": "json", "test_split": "test"}
    tasks = [
        {
            "task": "facts",
            "output_type": "multiple_choice",
            "doc_to_text": "{{before}}\n{{letter}}",
            "doc_to_target": "label",
            "doc_to_choice": WORDS,
            "metric_list": [{"metric": "acc"}],
        },
        {
            "task": "prose",
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    ]
    for task in tasks:
        data = {"dataset_kwargs": {"data_files": {"test": f"{task['task']}.jsonl"}}}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(common | data | task))


def run(rank: int, world_size: int, flags: str, every: int, start: int | None, factor: float) -> list[Point]:
    """Trains; from step `start` on, rank 1's part of each embedding is multiplied by `factor`."""
    config = resolve_legal(parse_args(flags.split()), world_size)
    points, interval, true = list[Point](), Interval(), VocabParallelEmbedding.forward

    def scaled(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        of_rank_1 = (tokens >= self.vocab_rows // 2).t()[..., None]
        return torch.where(of_rank_1, factor * true(self, tokens), true(self, tokens))

    assert config.training.train_iters is not None
    with local_run(config, rank, world_size) as training, mock.patch.object(VocabParallelEmbedding, "forward", true):
        for step in range(1, config.training.train_iters + 1):
            if step == start:
                VocabParallelEmbedding.forward = scaled  # type: ignore[method-assign]
            train_step(training)
            if step % every == 0:
                total, tokens = all_reduce_(sum(interval.losses), training.runtime.state.world).tolist()
                (suite,) = (callback.suite for callback in training.callbacks if isinstance(callback, EvalTasks))
                with training.pipeline.evaluation_mode():
                    found = suite.evaluate(scorer_of(training), generation_of(training, suite.tokenizer)).scores
                points.append((step, total / tokens, {each.task: (each.value, each.error or 0.0) for each in found}))
                interval = training.interval = Interval()
    return points


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=0.01, help="of rank 1's embeddings (default: 0.01)")
    parser.add_argument("--iterations", type=int, default=280, help="steps of each run (default: 280)")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations (default: 20)")
    args = parser.parse_args(argv)
    start = args.iterations // 7 + 1
    with tempfile.TemporaryDirectory(prefix="planted-bug-") as name:
        folder = Path(name)
        write_data(folder)
        flags = f"{MODEL} --train-iters {args.iterations} --data-path {folder}/text.jsonl --split 100,0,0 "
        flags += f"--data-cache-path {folder}/cache --eval-tasks {folder} "
        sound = run_world(2, run, flags, args.every, None, 1.0, timeout=3600.0)[0]
        other = run_world(2, run, flags + "--seed 5", args.every, None, 1.0, timeout=3600.0)[0]
        bad = run_world(2, run, flags, args.every, start, args.factor, timeout=3600.0)[0]
    return report(sound, other, bad, start, args.factor)


def report(sound: Sequence[Point], other: Sequence[Point], bad: Sequence[Point], start: int, factor: float) -> int:
    print(f"from step {start} on, the embeddings of tensor-parallel rank 1 are multiplied by {factor:g}")
    print(f"{'step':>5}  {'loss':^26}  {'facts (acc)':^26}  {'prose (bits per byte)':^26}")
    print(f"{'':5}" + 3 * f"  {'sound':>8} {'seed 5':>8} {'bug':>8}")
    pairs = list(zip(sound, other, bad, strict=True))
    gaps = [abs(one[1] - two[1]) for one, two, _ in pairs]
    seen: dict[str, int] = {}
    for place, (one, two, three) in enumerate(pairs):
        values = [(each[1], each[2]["facts"][0], each[2]["prose"][0]) for each in (one, two, three)]
        print(f"{one[0]:5}" + "".join("  " + " ".join(f"{each[k]:8.4f}" for each in values) for k in range(3)))
        if three[0] < start:
            continue
        if abs(three[1] - one[1]) > 3 * max(gaps[max(0, place - 1) : place + 2]):
            seen.setdefault("loss", three[0])
        error = sum(each[2]["facts"][1] ** 2 for each in (one, three)) ** 0.5
        if abs(three[2]["facts"][0] - one[2]["facts"][0]) > 3 * error:
            seen.setdefault("facts", three[0])
    for name in ("loss", "facts"):
        print(f"{name}: " + (f"shows the bug at step {seen[name]}" if name in seen else "does not show the bug"))
    return int("facts" not in seen)


if __name__ == "__main__":
    sys.exit(main())
