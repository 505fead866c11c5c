"""Time of a step with --optimizer-post-validation and without it, beside the simulator's.

    python tools/bench/post_validation.py                      # zb-h2 and zb-v on four gloo ranks
    python tools/bench/post_validation.py --schedules zb-h1 --num-microbatches 16

Passes sleep for a set time beside what a tiny model computes, so that idle time shows on a machine with fewer cores
than ranks. Three runs are alive at once and take turns: one that waits for the gradient norm, one that does not, and
one of which every step is clipped and rolled back (training would wait in the step behind a roll-back). A rank's step
lasts from the end of one to the end of the next; the first of each turn does not count. Ratios are of neighbouring
turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from megatron.core.pipeline_parallel.actions import Kind
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.passes import pipeline_lists, post_validated
from megatron.core.pipeline_parallel.schedules import layout_of
from megatron.core.pipeline_parallel.simulator import simulate
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training import training
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tools.bench.side_by_side import machine, positive, say_machine, write_json

MODEL = (
    "--num-layers 8 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data --lr 1e-4 "
    "--make-vocab-size-divisible-by 8 --untie-embeddings-and-output-weights --micro-batch-size 1 --eval-iters 0 "
    "--train-iters 100000 --log-interval 100000 --num-workers 0 --cpu"
)
SIDES = {
    "waits": "--clip-grad 1000",
    "validated later": "--clip-grad 1000 --optimizer-post-validation",
    "rolled back": "--clip-grad 1e-6 --optimizer-post-validation",
}
PASSES = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Units of time: F, I and W take equally long."""


@contextmanager
def asleep(executor: PipelineExecutor, seconds: float, phase: str) -> Iterator[None]:
    """Sleeps for what a pass of the rank's stage takes, beside what it computes."""
    assert executor.current is not None
    ends = time.perf_counter() + seconds * PASSES[executor.current.kind]
    yield
    time.sleep(max(0.0, ends - time.perf_counter()))


def measure(
    rank: int, world_size: int, flags: str, seconds: float, turns: int, steps: int
) -> dict[str, list[list[float]]]:
    """By side, and turn: seconds of each step on this rank."""
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(training, "likely_to_stand", return_value=True))
        runs = {}
        for side, more in SIDES.items():
            config = resolve_legal(parse_args([*flags.split(), *more.split()]), world_size)
            run = runs[side] = stack.enter_context(local_run(config, rank, world_size))
            run.pipeline.executor.timed = partial(asleep, run.pipeline.executor, seconds)
        for turn in range(turns + 1):  # the first turn makes what stays
            for side, run in runs.items():
                dist.barrier()
                ends = []
                for _ in range(steps + 1):
                    train_step(run)
                    ends.append(time.perf_counter())
                run.optimizer.validate()
                if turn:
                    found[side].append([b - a for a, b in pairwise(ends)])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedules", nargs="+", default=["zb-h2", "zb-v"])
    parser.add_argument("--pp", type=positive, default=4)
    parser.add_argument("--num-microbatches", type=positive, default=8)
    parser.add_argument("--milliseconds", type=positive, default=40, help="of F, of I and of W on all layers of a rank")
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=4, help="of each turn")
    parser.add_argument("--json", type=Path, help="write the results, with a record of the machine")
    args = parser.parse_args(argv)
    facts, rows = machine(), []
    say_machine(facts)
    for schedule in args.schedules:
        shape = schedule, args.pp, args.num_microbatches
        chunks = layout_of(schedule, args.pp).chunks
        unit = args.milliseconds / 1e3 / chunks
        flags = f"{MODEL} --pp {args.pp} --pipeline-schedule {schedule} --global-batch-size {args.num_microbatches}"
        ranks = run_world(args.pp, measure, flags, unit, args.turns, args.steps)
        # By side, the median of each turn over ranks and steps.
        medians = {
            side: [statistics.median(step for rank in ranks for step in rank[side][turn]) for turn in range(args.turns)]
            for side in SIDES
        }
        planned = {
            "waits": simulate(pipeline_lists(*shape)).makespan * unit,
            "validated later": post_validated(pipeline_lists(*shape, post_validation=True))[0] * unit,
        }
        for side, seconds in medians.items():
            paper = f", simulated {planned[side] * 1e3:.0f} ms" if side in planned else ""
            ratio = statistics.median(b / a for a, b in zip(medians["waits"], seconds, strict=True))
            beside = f"; {ratio:.3f} of the one that waits" if side != "waits" else ""
            if beside and side in planned:
                beside += f", simulated {planned[side] / planned['waits']:.3f}"
            print(f"{schedule}, {side}: a step takes {statistics.median(seconds) * 1e3:.0f} ms{paper}{beside}")
        rows.append({"schedule": schedule, "planned": planned, "turns": medians})
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
