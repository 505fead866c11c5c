"""Cost of --log-layer-stats 1: steps with and without statistics, in turns in one process, and what they count.

    python tools/bench/layer_stats.py                       # the models of train_step.py, float32 and bfloat16
    python tools/bench/layer_stats.py --style llama --dtype float32 --steps 30
    python tools/bench/layer_stats.py --flags --num-layers 8 --hidden-size 1024 ...   # any run, on a GPU too

Processor time counts on CPU, as other programs on the machine add nothing to it, and the time of the device on a GPU.
Each step with statistics is compared with the step before it, without; the median of the differences is the cost. What
is done once an interval, the reduction and the records, is timed apart. Bytes are those that the statistics must read
and write at least, FLOPs two for each element of a norm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.extensions.planner.flops import flops_per_token
from tools.bench.peers import STYLES
from tools.bench.side_by_side import machine, own_run, positive, say_machine, write_json
from tools.bench.train_step import flags as flags_of

if TYPE_CHECKING:
    from megatron.training.run import TrainingRun


@dataclass(frozen=True)
class Work:
    """What the statistics of a step read, write and compute on this rank."""

    gigabytes: float
    gflop: float
    of_step: float
    """Share of the FLOPs of the step."""

    @classmethod
    def of(cls, run: TrainingRun) -> Work:
        """Of each owned main parameter: a copy (read, written), a difference (two reads, one write), and norms of
        weight, gradient and difference (three reads). Of activations: the output of each layer, attention and MLP, and
        queries and keys."""
        model, training, parallel = run.config.model, run.config.training, run.config.parallel
        owned = sum(len(shard.bucket.owned_grads) for shard in run.optimizer.shards)
        tokens = run.batch_sizes.at(0) * model.seq_length / (run.runtime.state.dp.size * parallel.context_parallel_size)
        widths = 3 * model.hidden_size + (model.num_attention_heads + model.query_groups) * model.head_dim
        layers = sum(len(stage.decoder.layers) for stage in run.stages.values())
        activations = tokens * layers * widths / parallel.tensor_model_parallel_size
        main, width = (run.optimizer.shards[0].bucket.owned_grads.element_size(), 2 if parallel.bf16 else 4)
        gflop = (7 * owned + 2 * activations) / 1e9
        step = flops_per_token(model) * run.batch_sizes.at(0) * model.seq_length / run.runtime.state.world.size / 1e9
        assert training.micro_batch_size
        return cls((8 * main * owned + width * activations) / 1e9, gflop, gflop / step)


@dataclass(frozen=True)
class Row:
    name: str
    without_ms: float
    with_ms: float
    cost: float
    """Median of the differences, as a share of the median step without."""

    records_ms: float
    """Reduction and records of one step with statistics."""

    work: Work


def measure(name: str, flags: Sequence[str], steps: int) -> Row:
    """Trains 2 * `steps` steps, every other one with statistics."""
    run = own_run([*flags, "--log-layer-stats", "1"])
    from megatron.extensions.diagnosis.layer_stats.statistics import LayerStatistics
    from megatron.training.train_step import train_step

    (stats,), clock = [meter for meter in run.meters if isinstance(meter, LayerStatistics)], _clock(run)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    records = []
    for number in range(2 * (steps + 2)):
        stats.interval = number % 2
        start = clock()
        train_step(run)
        seconds[number % 2].append(clock() - start)
        if number % 2:
            start = clock()
            stats.records(stats.take())
            records.append(clock() - start)
    plain, measured = seconds[0][2:], seconds[1][2:]
    middle = statistics.median(plain)
    cost = statistics.median(b - a for a, b in zip(plain, measured, strict=True)) / middle
    return Row(name, 1e3 * middle, 1e3 * statistics.median(measured), cost, 1e3 * min(records), Work.of(run))


def _clock(run: TrainingRun) -> Callable[[], float]:
    if run.runtime.device.type != "cuda":
        return time.process_time
    import torch

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def say(row: Row) -> None:
    work, cost = row.work, f"{row.cost:+.2%} by turns"
    print(
        f"{row.name:<16} step {row.without_ms:8.1f} ms, with statistics {row.with_ms:8.1f} ms: {cost}; records "
        f"{row.records_ms:.1f} ms; {work.gigabytes:.3f} GB, {work.gflop:.3f} GFLOP, {work.of_step:.3%} of the step's",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=15, help="of each kind")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, help="of a run of your own, in place of the models")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    facts = machine() | {"threads": args.threads}
    say_machine(facts)
    rows = []
    if args.flags:
        rows.append(measure("flags", args.flags, args.steps))
        say(rows[-1])
    else:
        for style in args.style:
            for dtype in args.dtype:
                rows.append(measure(f"{style} {dtype}", flags_of(STYLES[style], dtype, False), args.steps))
                say(rows[-1])
    if args.json:
        write_json(args.json, facts, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
