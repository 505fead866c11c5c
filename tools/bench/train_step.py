"""Tokens per second of training in one process, optimizer step included, beside other programs' same model.

    python tools/bench/train_step.py                      # all eight cells, both styles
    python tools/bench/train_step.py --style llama --dtype float32 --mode eager --rounds 7
    python tools/bench/train_step.py --style gpt --dtype bfloat16 --mode compiled --profile
    python tools/bench/train_step.py --style llama --mode eager --dtype float32 bfloat16 float16 --own

Peers (tools/bench/peers.py): the models of transformers, litgpt, torchtitan and megatron-core, with torch's fused AdamW
and gradient clipping: `pip install -r tools/bench/requirements.txt`, in an environment of its own. In bf16 theirs are
bf16 parameters, updated in bf16, the fastest they can be trained; ours keeps fp32 main parameters and fp32 gradient
sums as always.

The ceiling is a process that does nothing but the matrix products of the model's linear layers and head, forward and
backward, in the same precision: everything else that a step has to do comes on top. Contestants are processes of
their own which take turns.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.peers import ONLY_LLAMA, PEERS, STYLES, Style, build_peer
from tools.bench.side_by_side import (
    Contestant,
    Round,
    Spread,
    bench_parser,
    interleaved,
    machine,
    own_step,
    positive,
    say_machine,
    timed,
    write_json,
)

FORMATS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
BETAS, EPS, WEIGHT_DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-4


def flags(style: Style, dtype: str, compiled: bool) -> list[str]:
    """Ours, as a user gives them."""
    text = (
        f"--num-layers {style.layers} --hidden-size {style.hidden} --num-attention-heads {style.heads} "
        f"--ffn-hidden-size {style.ffn} --seq-length {style.seq} --max-position-embeddings {style.seq} "
        f"--vocab-size {style.vocab} --micro-batch-size {style.micro_batch} --global-batch-size {style.micro_batch} "
        f"--attention-dropout 0 --hidden-dropout 0 --mock-data --train-iters 1000000 --eval-iters 0 --lr {LR} "
        f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --weight-decay {WEIGHT_DECAY} --cpu"
    ).split()
    if style.llama:
        text += (
            f"--group-query-attention --num-query-groups {style.groups} --position-embedding-type rope --swiglu "
            "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
        ).split()
    return text + FORMATS[dtype] + (["--compile"] if compiled else [])


def ours(style: Style, dtype: str, compiled: bool, steps: int, clock: Callable[[], float] = time.perf_counter) -> Round:
    return timed(own_step(flags(style, dtype, compiled)), steps, style.tokens, clock)


def profiled(style: Style, dtype: str, compiled: bool, steps: int) -> Round:
    """Prints where the time of our steps goes: operators' own time, forward and backward."""
    step = own_step(flags(style, dtype, compiled))

    def one_round() -> float:
        from torch.profiler import ProfilerActivity, profile

        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
        averages = profiler.key_averages()
        whole = sum(entry.self_cpu_time_total for entry in averages)
        print(f"\n{whole / steps / 1e3:.0f} ms a step, of it")
        for entry in sorted(averages, key=lambda entry: -entry.self_cpu_time_total)[:16]:
            print(f"{entry.self_cpu_time_total / whole:7.1%} {entry.count // steps:6} x {entry.key[:80]}", flush=True)
        return whole / steps / 1e6

    return one_round


def peer(name: str, style: Style, dtype: str, compiled: bool, steps: int) -> Round:
    """Another program's model in the loop that its users write."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model, loss_of = build_peer(name, style, dtype)
    run: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    batches = torch.randint(style.vocab, (16, style.micro_batch, style.seq + 1))
    place = 0

    def step() -> None:
        nonlocal place
        batch, place = batches[place % len(batches)], place + 1
        loss_of(run, batch[:, :-1], batch[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps, style.tokens)


def ceiling(style: Style, dtype: str, steps: int) -> Round:
    """The matrix products alone, each into memory that is there already."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind = getattr(torch, dtype)
    work = []
    for size_in, size_out in style.products:
        x, y = torch.randn(style.tokens, size_in, dtype=kind), torch.randn(style.tokens, size_out, dtype=kind)
        weight = torch.randn(size_out, size_in, dtype=kind)
        work.append((x, y, weight, torch.empty_like(x), torch.empty_like(y), torch.empty_like(weight)))

    def step() -> None:
        for x, y, weight, out_x, out_y, out_weight in work:
            torch.mm(x, weight.t(), out=out_y)
            torch.mm(y, weight, out=out_x)
            torch.mm(y.t(), x, out=out_weight)

    return timed(step, steps, style.tokens)


def contestants(name: str, dtype: str, compiled: bool, threads: int, steps: int) -> Iterator[Contestant]:
    style = STYLES[name]
    yield Contestant("ours", ours, (style, dtype, compiled, steps), threads)
    for other in PEERS:
        if style.llama or other not in ONLY_LLAMA:
            yield Contestant(other, peer, (other, style, dtype, compiled, steps), threads)
    yield Contestant("ceiling", ceiling, (style, dtype, steps), threads)


@dataclass(frozen=True)
class Row:
    style: str
    dtype: str
    mode: str
    contestant: str
    tokens_per_second: Spread | None
    failed: str | None
    of_best_peer: float | None
    of_ceiling: float | None


def cell(style: str, dtype: str, mode: str, threads: int, steps: int, rounds: int) -> list[Row]:
    """One style, dtype and mode: all contestants, the ratios of medians."""
    found = interleaved(list(contestants(style, dtype, mode == "compiled", threads, steps)), rounds)
    spreads = {name: Spread.of(values) for name, values in found.items() if not isinstance(values, str)}
    peers = [spread.median for name, spread in spreads.items() if name not in ("ours", "ceiling")]
    top = spreads["ceiling"].median if "ceiling" in spreads else None
    rows = []
    for name, values in found.items():
        spread = spreads.get(name)
        ratio = spread.median / max(peers) if spread and peers and name == "ours" else None
        share = spread.median / top if spread and top and name != "ceiling" else None
        rows.append(Row(style, dtype, mode, name, spread, values if isinstance(values, str) else None, ratio, share))
    return rows


def say_own(name: str, dtypes: Sequence[str], mode: str, threads: int, steps: int, rounds: int) -> None:
    """Our steps in each dtype, in turns: the time of the processor, which other programs change little."""
    style, compiled = STYLES[name], mode == "compiled"
    builds = [Contestant(dtype, ours, (style, dtype, compiled, steps, time.process_time), threads) for dtype in dtypes]
    found = interleaved(builds, rounds)
    first = found[dtypes[0]]
    for dtype, values in found.items():
        if isinstance(values, str) or isinstance(first, str):
            print(f"{name:<6} {mode:<9} {dtype:<9} failed: {values}", flush=True)
            continue
        seconds = Spread.of([style.tokens / value for value in values])
        ratio = Spread.of([one / value for one, value in zip(first, values, strict=True)])
        print(f"{name:<6} {mode:<9} {dtype:<9} {seconds:.2f} s a step, {ratio:.2f} x {dtypes[0]}", flush=True)


def say(row: Row) -> None:
    """A line of the table."""
    head = f"{row.style:<6} {row.dtype:<9} {row.mode:<9} {row.contestant:<13}"
    if row.tokens_per_second is None:
        print(f"{head} failed: {row.failed}", flush=True)
        return
    best = "" if row.of_best_peer is None else f"{row.of_best_peer:.2f} x best peer"
    share = "" if row.of_ceiling is None else f"{row.of_ceiling:.0%} of the ceiling"
    print(f"{head} {row.tokens_per_second:8,.0f} tokens/s   {share:<20} {best}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 5)
    parser.add_argument("--style", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--dtype", nargs="+", choices=FORMATS, default=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of each process (default: all cores)")
    parser.add_argument("--steps", type=positive, default=3, help="of a round")
    parser.add_argument("--profile", action="store_true", help="print where our time goes instead")
    parser.add_argument("--own", action="store_true", help="this program alone, all --dtype in turns, processor time")
    args = parser.parse_args(argv)
    if args.own and args.json:
        parser.error("--json: has no figures of --own, which prints them; leave one of both out")
    facts = machine(*PEERS) | {"threads": args.threads}
    say_machine(facts)
    rows: list[Row] = []
    if args.own:
        for style, mode in product(args.style, args.mode):
            say_own(style, args.dtype, mode, args.threads, args.steps, args.rounds)
        return 0
    for style in args.style:
        for dtype in args.dtype:
            for mode in args.mode:
                if args.profile:
                    print(f"\n{style} {dtype} {mode}", end="", flush=True)
                    arguments = (STYLES[style], dtype, mode == "compiled", args.steps)
                    interleaved([Contestant("ours", profiled, arguments, args.threads)], rounds=1, warm_up=0)
                    continue
                found = cell(style, dtype, mode, args.threads, args.steps, args.rounds)
                for row in found:
                    say(row)
                rows += found
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
