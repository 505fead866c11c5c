"""Cost of evaluation tasks as a share of training: the same run with and without --eval-tasks, in turns.

    python tools/bench/eval_tasks.py
    python tools/bench/eval_tasks.py --tasks tasks/ --flags "--num-layers 12 --hidden-size 768 ..." --interval 1000

Prints the processor time of the runs, the seconds of an evaluation and of a step, and the share of the time that an
evaluation every --interval steps takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]

FLAGS = (
    "--cpu --num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --mock-data --tokenizer-type ByteTokenizer --lr 1e-3 "
    "--global-batch-size 16 --micro-batch-size 4 --eval-iters 0 --num-workers 0"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default=FLAGS, help="of pretrain_gpt.py, without length and tasks")
    parser.add_argument("--tasks", default=str(ROOT / "tests" / "fixtures" / "eval_tasks"), help="task files")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of a run; tasks come after each half (default: 12)"
    )
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--interval", type=int, default=1000, help="steps between evaluations (default: 1000)")
    args = parser.parse_args(argv)
    base = f"{args.flags} --train-iters {args.steps} --log-interval 1"
    tasks = f"--eval-tasks {args.tasks} --eval-tasks-interval {args.steps // 2}"
    plain, scored = list[float](), list[float]()
    steps, seconds = list[float](), list[float]()
    for _ in range(args.turns):
        plain.append(timed(base)[0])
        used, records = timed(f"{base} {tasks}")
        scored.append(used)
        steps += [record["step_time"] for record in records[1:] if "step_time" in record]
        seconds += [record["eval_tasks_seconds"] for record in records if "eval_tasks_seconds" in record]
    step, evaluation = median(steps), median(seconds)
    share = evaluation / (evaluation + args.interval * step)
    extra = (median(scored) - median(plain)) / 2
    print(f"processor time of {args.steps} steps: {median(plain):.2f} s, with two evaluations {median(scored):.2f} s")
    print(f"an evaluation: {extra:.2f} s of processor time, {evaluation:.2f} s by the clock; a step {step:.3f} s")
    print(f"one every {args.interval} steps: {100 * share:.2f} % of the time; as long as {evaluation / step:.1f} steps")
    return 0


def timed(flags: str) -> tuple[float, list[dict]]:
    """(processor seconds of a run in one process, its records)."""
    with tempfile.TemporaryDirectory(prefix="bench-eval-tasks-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "pretrain_gpt.py", *shlex.split(flags), "--metrics-file", str(metrics)]
        before = os.times()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return used, [json.loads(line) for line in metrics.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
