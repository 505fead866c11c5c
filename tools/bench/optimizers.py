"""Time of an update by one optimizer beside another's, and of the whole step: ratios of medians, in turns.

    python tools/bench/optimizers.py                            # Adam and Muon, on one process
    python tools/bench/optimizers.py --threads 1 --clock processor      # beside other programs, on CPU
    python tools/bench/optimizers.py --ranks 2 --rounds 7       # ZeRO-1 over two ranks: with the exchange of matrices
    python tools/bench/optimizers.py --optimizers adam "muon --muon-fp32-matmul-prec highest" -- --hidden-size 512

Flags behind `--` are pretrain_gpt.py's, in place of those of the model below. An update costs the same whatever the
batch, so its share of a step falls as the batch grows; the tokens of a step are printed. Contestants are processes of
their own which take turns; of several ranks the slowest counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tools.bench.side_by_side import (
    Contestant,
    Round,
    Spread,
    interleaved,
    machine,
    own_run,
    positive,
    say_machine,
    write_json,
)

MODEL = (
    "--num-layers 6 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --seq-length 512 --vocab-size 32000 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --global-batch-size 4 --micro-batch-size 2 --lr 1e-4 --mock-data --train-iters 1000000 "
    "--eval-iters 0 --num-workers 0 --bf16 --cpu"
)
PARTS = ("update", "step")


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def measured(flags: Sequence[str], part: str, steps: int, clock: str) -> Round:
    """Updates, or whole steps, per second of a clock of `CLOCKS`; the update includes the gather of parameters."""
    run, now = own_run(flags), CLOCKS[clock]
    import torch

    from megatron.training.train_step import train_step

    def wait() -> None:
        run.optimizer.finish_param_sync()
        if run.runtime.device.type == "cuda":
            torch.cuda.synchronize()

    def note(final: list[float]) -> None:
        wait()
        final.append(now())

    def one_round() -> float:
        seconds = []
        for _ in range(steps):
            wait()
            began = now()
            final: list[float] = []
            train_step(run, before_update=partial(note, final))
            wait()
            seconds.append(now() - (final[0] if part == "update" else began))
        return 1 / statistics.median(seconds)

    return one_round


@dataclass(frozen=True)
class Row:
    optimizer: str
    part: str
    milliseconds: Spread
    ratio: float
    """Of the median to that of the first optimizer."""


def rows_of(found: dict[str, list[float] | str], optimizers: Sequence[str]) -> list[Row]:
    """Raises ValueError if a contestant failed."""
    rows: list[Row] = []
    for part in PARTS:
        first = None
        for optimizer in optimizers:
            values = found[f"{optimizer} {part}"]
            if isinstance(values, str):
                raise ValueError(f"{optimizer}: {values}")
            spread = Spread.of([1e3 / value for value in values])
            first = first or spread.median
            rows.append(Row(optimizer, part, spread, spread.median / first))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"], help="values of --optimizer, with flags")
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--threads", type=positive, help="of each process (default: the cores, over the ranks)")
    parser.add_argument("--steps", type=positive, default=2, help="of a round, whose median counts")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: on a CPU that others use too")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("flags", nargs="*", help="flags of pretrain_gpt.py, behind --")
    args = parser.parse_args(argv)
    flags = [*MODEL.split(), *args.flags]
    config = resolve(parse_args(flags), args.ranks)
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    facts = machine() | {"threads": threads, "ranks": args.ranks}
    say_machine(facts)
    tokens = (config.training.global_batch_size or 0) * config.model.seq_length
    print(f"{args.ranks} ranks, {threads} threads each, {tokens:,} tokens in a step, {args.clock} time")
    contestants = [
        Contestant(
            f"{optimizer} {part}",
            measured,
            ([*flags, "--optimizer", *optimizer.split()], part, args.steps, args.clock),
            threads,
            args.ranks,
        )
        for part in PARTS
        for optimizer in args.optimizers
    ]
    rows = rows_of(interleaved(contestants, args.rounds), args.optimizers)
    whole = {row.optimizer: row.milliseconds.median for row in rows if row.part == "step"}
    for row in rows:
        print(
            f"{row.part:<7} {row.optimizer:<30} {row.milliseconds:8.1f} ms   {row.ratio:.2f} x {args.optimizers[0]}",
            end="",
        )
        print(f", {row.milliseconds.median / whole[row.optimizer]:.1%} of its step" if row.part == "update" else "")
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
