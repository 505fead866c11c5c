"""How much of experts' all-to-alls is behind computation, with --overlap-moe-expert-parallel-comm and without it.

    python tools/bench/expert_overlap.py                  # four gloo ranks, EP 2 x PP 2
    python tools/bench/expert_overlap.py --schedule zb-h2 --traces traces

A step is profiled on every rank. An all-to-all lasts, in the trace, from its start to its end on gloo's own thread. It
is behind computation as long as neither pass waits for one. The simulator has the action lists that ran, with the ratio
of all-to-alls to the rest of the actions that was measured without overlap.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatron.core.moe.dispatcher import WAIT
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.simulator import StageCosts, simulate
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tools.bench.profile_groups import spans_of
from tools.bench.side_by_side import machine, positive, say_machine, write_json

PP, EP, LAYERS, CHUNKS = 2, 2, 4, {"interleaved": 2, "zb-h2": 1}
MODEL = (
    f"--num-layers {LAYERS} --num-attention-heads 8 --vocab-size 1000 --mock-data --lr 1e-4 --micro-batch-size 1 "
    "--train-iters 100 --eval-iters 0 --num-workers 0 --cpu --disable-bias-linear --num-experts 8 --swiglu "
    f"--moe-router-force-load-balancing --moe-token-dispatcher-type alltoall --pp {PP} --ep {EP}"
)
OVERLAP = "--overlap-moe-expert-parallel-comm"
STEPS = 3

Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Shares:
    """Of one profiled step of one rank. Microseconds."""

    exchanging: float
    """Time in which one of the collectives is under way."""

    hidden: float
    """Part of it in which the rank does not wait for one."""

    computing: float
    """Time of the actions that compute, without these waits."""

    span: float

    @property
    def share(self) -> float:
        return self.hidden / self.exchanging if self.exchanging else 0.0


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same times, sorted, as intervals that do not touch."""
    found: Intervals = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common(a: Intervals, b: Intervals) -> float:
    """Time that is in both unions."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return total


def length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


@dataclass(frozen=True)
class Pattern:
    """Names of spans in a trace."""

    collective: str
    """Pattern of the collectives, on their own thread."""

    wait: str
    """The range of the program's own in which it waits for one."""


ALL_TO_ALLS = Pattern("gloo:all_to_all$", WAIT)


def shares_of(trace: dict[str, Any], pattern: Pattern = ALL_TO_ALLS) -> Shares:
    """What a trace of torch's profiler says."""
    spans = spans_of(trace, ("user_annotation",))
    exchanging, waiting, running = (
        union((span.start, span.stop) for span in spans if re.match(pattern, span.name))
        for pattern in (pattern.collective, re.escape(pattern.wait), r"(F|B|I|W|FB)\(stage")
    )
    exposed = common(exchanging, waiting)
    computing = length(running) - common(running, waiting)
    return Shares(length(exchanging), length(exchanging) - exposed, computing, running[-1][1] - running[0][0])


def profiled_steps(
    rank: int, world_size: int, flags: str, folder: str, patterns: Mapping[str, Pattern]
) -> dict[str, list[Shares]]:
    """Of some steps, after two that make what stays, by kind of collective. The last trace is left in `folder`."""
    config = resolve_legal(parse_args(flags.split()), world_size)
    path = Path(folder) / f"rank-{rank}.json"
    found: dict[str, list[Shares]] = {kind: [] for kind in patterns}
    with local_run(config, rank, world_size) as run:
        for _ in range(2):
            train_step(run)
        for _ in range(STEPS):
            threads = _ExperimentalConfig(profile_all_threads=True)
            with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiled:
                train_step(run)
            profiled.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
            for kind, pattern in patterns.items():
                found[kind].append(shares_of(trace, pattern))
    return found


def measure(rank: int, world_size: int, flags: str, folder: str) -> list[Shares]:
    """Of the all-to-alls of experts, see `profiled_steps`."""
    return profiled_steps(rank, world_size, flags, folder, {"all-to-alls": ALL_TO_ALLS})["all-to-alls"]


def simulated(schedule: str, microbatches: int, in_turns: bool, ratio: float) -> float:
    """Share of the all-to-alls behind computation; `ratio` is their time beside that of computation."""
    exchanges = 2 * LAYERS // (PP * CHUNKS[schedule])  # there and back in each layer, and as many in the backward
    costs = StageCosts(exchanges=exchanges, exchange=3 * ratio / (2 * exchanges))
    found = simulate(pipeline_lists(schedule, PP, microbatches, CHUNKS[schedule], in_turns=in_turns), costs)
    return max(0.0, 1 - found.exposed / found.exchanging)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedule", choices=CHUNKS, default="interleaved")
    parser.add_argument("--num-microbatches", type=positive, default=8)
    parser.add_argument("--hidden-size", type=positive, default=256)
    parser.add_argument("--seq-length", type=positive, default=256)
    parser.add_argument("--traces", type=Path, help="keep the ranks' traces in this folder, for Perfetto")
    parser.add_argument("--json", type=Path, help="write the results, with a record of the machine")
    args = parser.parse_args(argv)
    facts, rows, ratio = machine(), [], 0.0
    say_machine(facts)
    for in_turns in (False, True):
        flags = (
            f"{MODEL} --hidden-size {args.hidden_size} --seq-length {args.seq_length} --moe-ffn-hidden-size "
            f"{2 * args.hidden_size} --global-batch-size {EP * args.num_microbatches} --pipeline-schedule "
            f"{args.schedule} {OVERLAP if in_turns else ''}"
        )
        with tempfile.TemporaryDirectory() as temporary:
            folder = temporary
            if args.traces is not None:
                folder = str(args.traces / ("overlapped" if in_turns else "plain"))
                Path(folder).mkdir(parents=True, exist_ok=True)
            ranks = run_world(PP * EP, measure, flags, folder)
        steps = [shares for rank in ranks for shares in rank]
        if not in_turns:
            ratio = statistics.median(s.exchanging / s.computing for s in steps)
        share = statistics.median(s.share for s in steps)
        paper = simulated(args.schedule, args.num_microbatches, in_turns, ratio)
        each = ", ".join(f"{statistics.median(s.share for s in rank):.0%}" for rank in ranks)
        print(
            f"{args.schedule} {'in turns' if in_turns else 'one after the other'}: {share:.0%} of the all-to-alls "
            f"behind computation (ranks: {each}), simulated {paper:.0%}; "
            f"a step takes {statistics.median(s.span for s in steps) / 1e3:.0f} ms"
        )
        rows.append({"in_turns": in_turns, "simulated": paper, "ranks": [[asdict(s) for s in r] for r in ranks]})
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
